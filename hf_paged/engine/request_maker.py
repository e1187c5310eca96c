"""The maker of requests: it gives a new request its sequence, its parameters for the device, and its features."""

from __future__ import annotations

from hf_paged.config import PagedConfig
from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.session import NewRequest, Request, Session
from hf_paged.models import ModelExecutor
from hf_paged.runner.device import DevicePool
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence


class RequestMaker:
    """The maker of one engine's requests.

    Args:
        pool: has the longest length of a request.
        features: the engine's features, of which each request gets the ones that it uses.
    """

    def __init__(self, executor: ModelExecutor, config: PagedConfig, pool: DevicePool, features: FeatureSet) -> None:
        self._executor, self._config, self._pool, self._features = executor, config, pool, features

    def make(self, new: NewRequest, session: Session) -> Request:
        """Return a request of its caller's session, which is not queued yet.

        Raises:
            ValueError: settings that the device's tables cannot hold, or that a feature refuses.
        """
        assert new.request_id is not None
        settings, prompt_length, made = new.settings, len(new.prompt), new.made
        eos = tuple([t for t in settings.eos_token_ids if 0 <= t < self._executor.vocab_size])  # the rest cannot occur
        parameters = SlotParameters(
            **settings.drawing(), seed=new.seed, min_length=prompt_length + settings.min_new_tokens, eos_token_ids=eos,
            max_length=min(prompt_length + settings.max_new_tokens, self._pool.max_model_len),
            prompt_length=prompt_length, edits=settings.edits, adapter=settings.adapter_name,
            stop_token_ids=settings.stop_token_ids, with_top=settings.top_logprobs is not None,
        )
        _ = parameters.lines  # encoded here, so that a ValueError of it is raised to the caller and not in a step
        sequence = Sequence(new.request_id, new.prompt, max_new_tokens=settings.max_new_tokens,
                            eos_token_ids=(*eos, *settings.stop_token_ids), priority=new.priority,
                            read_cache=not settings.prompt_logprobs, cache_salt=settings.cache_salt,
                            adapter=settings.adapter_name,
                            keeps_computed=(settings.on_weight_change or self._config.on_weight_change) == "keep",
                            output_token_ids=() if made is None else made.token_ids)
        request = Request(sequence, settings, parameters, session, stop=new.stop, made=made, grammar=new.grammar)
        if made is not None:
            request.num_emitted = len(made.token_ids)
        self._features.admit(request)
        return request
