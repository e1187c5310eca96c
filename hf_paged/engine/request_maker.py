"""What becomes of a request that is asked for: its sequence, its parameters for the device, and its features."""

from __future__ import annotations

from hf_paged.config import PagedConfig
from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.session import NewRequest, Request, Session
from hf_paged.models import ModelExecutor
from hf_paged.runner.device import DevicePool
from hf_paged.runner.request_state import SlotParameters
from hf_paged.scheduler import Sequence


class RequestMaker:
    """Makes the requests of one engine.

    Args:
        pool: says how long a request may become.
        features: are asked which of them each request uses.
    """

    def __init__(self, executor: ModelExecutor, config: PagedConfig, pool: DevicePool, features: FeatureSet) -> None:
        self._executor, self._config, self._pool, self._features = executor, config, pool, features

    def make(self, new: NewRequest, session: Session) -> Request:
        """The request, in its caller's session.

        Raises:
            ValueError: settings that the device's tables cannot hold, or that a feature refuses.
        """
        assert new.request_id is not None
        settings, prompt_length, made = new.settings, len(new.prompt), new.made
        eos = tuple([t for t in settings.eos_token_ids if 0 <= t < self._executor.vocab_size])  # others never come
        parameters = SlotParameters(
            **settings.drawing(), seed=new.seed, min_length=prompt_length + settings.min_new_tokens, eos_token_ids=eos,
            max_length=min(prompt_length + settings.max_new_tokens, self._pool.max_model_len),
            prompt_length=prompt_length, edits=settings.edits, adapter=settings.adapter_name,
            stop_token_ids=settings.stop_token_ids, with_top=settings.top_logprobs is not None,
        )
        _ = parameters.lines  # encoded here, where what cannot be encoded is its caller's error
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
