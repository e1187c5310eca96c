"""TRL's GRPOTrainer on an enabled model: rollouts are stock's under the weights of the moment, and training goes on.

Rollouts are greedy, so that they can be compared token by token. All completions of a group are then alike and their
advantages zero: it is the entropy bonus that moves the weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from family_models import family_model
from recurrent_models import recurrent_model, with_idiom
from support import stock_copy
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_paged
from hf_paged.engine.features.routed_experts import RoutedExperts
from hf_paged.guards.hooks import ReplayHook
from hf_paged.models.routing.record import routers_of

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl", reason="an extra of the test environment")
trl_utils = pytest.importorskip("trl.trainer.utils")

pytestmark = pytest.mark.usefixtures("no_accelerator_left")
SUMS = [(41, 3), (52, 6), (13, 8), (77, 4), (31, 2), (62, 9)]
STEPS, GROUP, NEW_TOKENS = 4, 2, 12


class Rollout(NamedTuple):
    prompts: list[Any]
    completions: list[list[int]]
    rewards: list[float]
    weights: dict[str, torch.Tensor]  # as they were when the reward function saw the completions


class Run(NamedTuple):
    rollouts: list[Rollout]
    trainer: Any
    fallbacks: set[str]

    @property
    def model(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.trainer.model)

    def log(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]


def _load(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _train(model: PreTrainedModel, tokenizer: Any, folder: Any, generation: dict[str, Any] | None = None,
           peft_config: Any = None, **overrides: Any) -> Run:
    """A few steps of GRPO; what the reward function saw, and what hf_paged warned of."""
    rollouts: list[Rollout] = []

    def distinct_tokens(prompts: list, completions: list, completion_ids: list, **_: Any) -> list[float]:
        rewards = [float(len(set(ids))) for ids in completion_ids]
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        rollouts.append(Rollout(copy.deepcopy(prompts), [list(ids) for ids in completion_ids], rewards, weights))
        return rewards

    settings: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2 * GROUP, "num_generations": GROUP,
        "max_completion_length": NEW_TOKENS, "max_steps": STEPS, "learning_rate": 3e-3, "entropy_coef": 1.0,
        "bf16": False, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 0,
        "disable_tqdm": True, "shuffle_dataset": False, "generation_kwargs": generation or {"do_sample": False},
    }
    args = trl.GRPOConfig(**(settings | overrides))
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}]} for a, b in SUMS]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = trl.GRPOTrainer(model=model, reward_funcs=distinct_tokens, args=args,
                                  train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer,
                                  peft_config=peft_config)
        trainer.train()
    fallbacks = {str(w.message) for w in caught if issubclass(w.category, hf_paged.FallbackWarning)}
    return Run(rollouts, trainer, fallbacks)


def _stock_completions(stock: PreTrainedModel, tokenizer: Any, rollout: Rollout, weights: dict) -> list[list[int]]:
    """Greedy answers of a stock model with these weights, up to and with the first EOS, one prompt at a time."""
    stock.load_state_dict(weights)
    answers = []
    for prompt in rollout.prompts:
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        row = stock.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
        eos = tokenizer.eos_token_id
        answers.append(row[: row.index(eos) + 1] if eos in row else row)
    return answers


def _assert_same_run(ours: Run, stock: Run) -> None:
    """Equal rollouts, rewards and losses, and in the end bitwise equal weights."""
    assert len(ours.rollouts) == len(stock.rollouts) == STEPS
    for a, b in zip(ours.rollouts, stock.rollouts, strict=True):
        assert a[:3] == b[:3]
    for name in ("loss", "grad_norm", "reward"):
        assert ours.log(name) == stock.log(name)
    assert ours.log("reward") == [sum(r.rewards) / len(r.rewards) for r in ours.rollouts]
    for (name, a), (_, b) in zip(ours.model.named_parameters(), stock.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def _assert_rollouts_follow_the_weights(run: Run, stock: PreTrainedModel, tokenizer: Any) -> None:
    """Each rollout is what stock makes with the weights of that moment, and not with those of the rollout before."""
    stale = 0
    for i, rollout in enumerate(run.rollouts):
        assert _stock_completions(stock, tokenizer, rollout, rollout.weights) == rollout.completions, i
        if i:
            before = run.rollouts[i - 1].weights
            assert any(not torch.equal(before[name], weight) for name, weight in rollout.weights.items())
            stale += _stock_completions(stock, tokenizer, rollout, before) != rollout.completions
    assert stale >= 1, "the weights moved too little to tell"


def _tokens_made(run: Run) -> int:
    return sum(len(ids) for rollout in run.rollouts for ids in rollout.completions)


def _scored(stock: PreTrainedModel, tokenizer: Any, rollout: Rollout, *,
            bf16: bool = False) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield each completion's token ids, and stock's logits for them, float32, under bf16 autocast if so."""
    for prompt, answer in zip(rollout.prompts, rollout.completions, strict=True):
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = stock(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        yield answer, logits.float()


def test_default_path_is_native_and_equals_a_run_without_hf_paged(trained_path, trained_tokenizer, tmp_path):
    stock = _train(_load(trained_path), trained_tokenizer, tmp_path)
    model = hf_paged.enable(_load(trained_path), strict=True)
    ours = _train(model, trained_tokenizer, tmp_path)
    _assert_same_run(ours, stock)
    _assert_rollouts_follow_the_weights(ours, _load(trained_path), trained_tokenizer)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == _tokens_made(ours)


def test_default_path_with_a_peft_config(trained_path, trained_tokenizer, tmp_path):
    """The trainer puts LoRA around the enabled model; the reference for the KL term is the same one, adapter off."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    options = {"peft_config": lora, "beta": 0.1, "learning_rate": 3e-2}
    torch.manual_seed(3)  # LoRA's random half
    stock = _train(_load(trained_path), trained_tokenizer, tmp_path, **options)
    torch.manual_seed(3)
    model = hf_paged.enable(_load(trained_path), strict=True)
    ours = _train(model, trained_tokenizer, tmp_path, **options)
    _assert_same_run(ours, stock)
    assert ours.rollouts[0].completions != ours.rollouts[-1].completions
    assert hf_paged.get_engine(ours.model).stats().num_generated_tokens == _tokens_made(ours)


def test_sampled_rollouts_come_from_the_distribution_of_the_moment(trained_path, trained_tokenizer, tmp_path):
    """Each sampled token is among stock's top 4 under the weights of its rollout; with other weights some are not."""
    model = hf_paged.enable(_load(trained_path), strict=True)
    sampling = {"do_sample": True, "top_k": 4, "temperature": 1.0}
    run = _train(model, trained_tokenizer, tmp_path, sampling, entropy_coef=2.0)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == _tokens_made(run)
    assert any(len({tuple(ids) for ids in rollout.completions[:GROUP]}) > 1 for rollout in run.rollouts)
    stock = _load(trained_path)

    def unlikely(rollout: Rollout, weights: dict[str, torch.Tensor]) -> int:
        """Tokens outside the top 4."""
        stock.load_state_dict(weights)
        count = 0
        for answer, logits in _scored(stock, trained_tokenizer, rollout):
            top = logits.topk(4).values[:, -1]
            count += int((logits[range(len(answer)), answer] < top - 1e-4).sum())
        return count

    assert [unlikely(rollout, rollout.weights) for rollout in run.rollouts] == [0] * STEPS
    assert unlikely(run.rollouts[-1], run.rollouts[0].weights) > 0


def test_fp32_weights_under_bf16_autocast_are_native(trained_path, trained_tokenizer, tmp_path):
    """TRL's defaults: rollouts are stock's under the same autocast, so rewards, losses and weights are bitwise its.

    The learning rate as in the next test.
    """
    options = {"bf16": True, "learning_rate": 2e-4, "entropy_coef": 0.1}
    stock = _train(_load(trained_path), trained_tokenizer, tmp_path, **options)
    model = hf_paged.enable(_load(trained_path), strict=True)
    ours = _train(model, trained_tokenizer, tmp_path, **options)
    _assert_same_run(ours, stock)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == _tokens_made(ours)
    assert not torch.equal(ours.rollouts[0].weights["lm_head.weight"], ours.rollouts[-1].weights["lm_head.weight"])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_bf16_weights_under_bf16_autocast_are_native(trained_path, trained_tokenizer, tmp_path):
    """A small learning rate: the trained model's margins stay far above the noise of bf16."""
    options = {"bf16": True, "learning_rate": 2e-4, "entropy_coef": 0.1}
    stock = _train(_load(trained_path, torch.bfloat16), trained_tokenizer, tmp_path, **options)
    model = hf_paged.enable(_load(trained_path, torch.bfloat16), strict=True)
    ours = _train(model, trained_tokenizer, tmp_path, **options)
    assert [r[:3] for r in ours.rollouts] == [r[:3] for r in stock.rollouts]
    assert hf_paged.get_engine(model).stats().num_generated_tokens == _tokens_made(ours)
    assert not torch.equal(ours.rollouts[0].weights["lm_head.weight"], ours.rollouts[-1].weights["lm_head.weight"])


@pytest.mark.parametrize("bf16", [False, True])
def test_transformers_continuous_batching(trained_path, trained_tokenizer, tmp_path, bf16):
    """Whoever carries out `generate_batch`. With bf16=True TRL casts the weights themselves."""
    blocks = {"num_blocks": 64, "max_batch_tokens": 256}
    options: dict[str, Any] = {"use_transformers_continuous_batching": True, "bf16": bf16,
                               "transformers_continuous_batching_config": blocks}
    if bf16:
        options |= {"learning_rate": 2e-4, "entropy_coef": 0.1}
    model = hf_paged.enable(_load(trained_path))
    ours = _train(model, trained_tokenizer, tmp_path, **options)
    assert len(ours.rollouts) == STEPS
    assert ours.log("reward") == [sum(r.rewards) / len(r.rewards) for r in ours.rollouts]
    stock = _load(trained_path, torch.bfloat16 if bf16 else torch.float32)
    if not bf16:
        _assert_rollouts_follow_the_weights(ours, stock, trained_tokenizer)
        return
    for rollout in ours.rollouts:
        assert _stock_completions(stock, trained_tokenizer, rollout, rollout.weights) == rollout.completions
    assert not torch.equal(ours.rollouts[0].weights["lm_head.weight"], ours.rollouts[-1].weights["lm_head.weight"])


# -- a model with a recurrent state --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recurrent_path(tmp_path_factory, trained_tokenizer) -> str:
    folder = tmp_path_factory.mktemp("recurrent")
    recurrent_model("Qwen3_5", vocab_size=len(trained_tokenizer)).save_pretrained(folder)
    return str(folder)


@with_idiom
@pytest.mark.parametrize("has_lora", [False, True])
def test_qwen3_5_is_native_and_equals_a_run_without_hf_paged(recurrent_path, trained_tokenizer, tmp_path, has_lora):
    options: dict[str, Any] = {"learning_rate": 1e-2}
    if has_lora:
        peft = pytest.importorskip("peft")
        lora = peft.LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "in_proj_qkv", "out_proj", "up_proj"],
                               task_type="CAUSAL_LM")
        options = {"peft_config": lora, "beta": 0.1, "learning_rate": 3e-2}

    def run(model: PreTrainedModel) -> Run:
        torch.manual_seed(3)  # LoRA's random half
        return _train(model, trained_tokenizer, tmp_path, **options)

    stock, model = run(_load(recurrent_path)), hf_paged.enable(_load(recurrent_path), strict=True)
    ours = run(model)
    _assert_same_run(ours, stock)
    assert not ours.fallbacks
    assert ours.rollouts[0].completions != ours.rollouts[-1].completions
    assert hf_paged.get_engine(ours.model).stats().num_generated_tokens == _tokens_made(ours)
    if not has_lora:
        _assert_rollouts_follow_the_weights(ours, _load(recurrent_path), trained_tokenizer)


@with_idiom
def test_qwen3_5_under_bf16_autocast_is_native(recurrent_path, trained_tokenizer, tmp_path):
    """Each token is, but for near ties of a random model, stock's under autocast and the weights of its rollout."""
    model = hf_paged.enable(_load(recurrent_path), strict=True)
    run = _train(model, trained_tokenizer, tmp_path, bf16=True, learning_rate=1e-2)
    assert not run.fallbacks
    assert hf_paged.get_engine(model).stats().num_generated_tokens == _tokens_made(run)
    stock = _load(recurrent_path)

    def furthest_from_top(rollout: Rollout, weights: dict[str, torch.Tensor]) -> float:
        stock.load_state_dict(weights)
        found = 0.0
        for answer, logits in _scored(stock, trained_tokenizer, rollout, bf16=True):
            found = max(found, float((logits.amax(1) - logits[range(len(answer)), answer]).max() / logits.std()))
        return found

    assert max(furthest_from_top(rollout, rollout.weights) for rollout in run.rollouts) < 0.1
    assert furthest_from_top(run.rollouts[-1], run.rollouts[0].weights) > 0.5


# -- TRL's fused LM head, which every trainer puts on the instance ------------------------------------------

QUESTION = [{"role": "user", "content": "What is 47 + 8?"}]


def _question(tokenizer: Any) -> dict[str, torch.Tensor]:
    return dict(tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt"))


def test_the_fused_lm_head_is_no_reason_for_stock_and_still_gives_log_probs(trained_path, trained_tokenizer):
    model, stock = _load(trained_path), _load(trained_path)
    inputs = _question(trained_tokenizer)
    expected = stock.generate(**inputs, max_new_tokens=NEW_TOKENS)
    for each in (model, stock):
        trl_utils.add_fused_lm_head(each)
    hf_paged.enable(model, strict=True)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW_TOKENS), expected)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == expected.shape[1] - inputs["input_ids"].shape[1]
    ours, theirs = (m(expected, labels=expected, fused_lm_head=True).log_probs for m in (model, stock))
    assert torch.equal(ours, theirs)


def test_a_copy_whose_fused_lm_head_runs_the_originals_forward_goes_to_stock(trained_path, trained_tokenizer):
    """`deepcopy` copies the method but not its closure: the copy's forward computes with the original's weights."""
    model = _load(trained_path)
    inputs = _question(trained_tokenizer)
    expected = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
    trl_utils.add_fused_lm_head(model)
    copied = stock_copy(model)
    with torch.no_grad():
        copied.model.norm.weight.neg_()
    hf_paged.enable(copied)
    with pytest.warns(hf_paged.FallbackWarning, match="wrapper that hf_paged does not know"):
        assert torch.equal(copied.generate(**inputs, max_new_tokens=NEW_TOKENS), expected)


def test_another_forward_of_that_name_is_not_taken_for_trls(trained_path, trained_tokenizer):
    model = _load(trained_path)
    original_forward = model.forward

    def _fused_forward(*args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        output = original_forward(*args, **kwargs)
        output.logits = -output.logits
        return output

    model.forward = _fused_forward
    inputs = _question(trained_tokenizer)
    expected = model.generate(**inputs, max_new_tokens=4)
    hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match="wrapper that hf_paged does not know"):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4), expected)


@pytest.mark.parametrize("replays", [True, False])
def test_a_trainer_takes_the_routes_of_its_rollouts(trained_tokenizer, tmp_path, replays):
    """Old log-probabilities and updates alike, activations computed again among them. The sampler's routes, here each
    expert's neighbour, are those of the trainer's forwards."""
    model = family_model("qwen3-moe", vocab_size=len(trained_tokenizer))
    routers, seen = routers_of(model).values(), []
    hf_paged.install(replay_routes=replays, strict=True)
    try:
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
        engine = hf_paged.get_engine(model)
        store = engine._replay and engine._replay.store
        if store:
            engine._core.features[RoutedExperts].keep = lambda ids, routes, adapter: store.keep(
                ids, torch.where(routes < 0, routes, (routes + 1) % 8))
        for router in routers:
            router.register_forward_hook(ReplayHook(router, partial(_note_choice, seen)))  # which eligibility knows
        _train(model, trained_tokenizer, tmp_path, {"do_sample": True}, num_iterations=2, max_steps=2,
               steps_per_generation=1, gradient_checkpointing=True)
        stats = engine.stats()
        assert not stats.num_rows_not_replayed and stats.num_rows_replayed == (12 if replays else 0)
        # Of two layers: once for old log-probabilities, and twice in each of two updates.
        assert (len(seen) == 10 or not replays) and all((same < 0.1) == replays for same in seen)
    finally:
        hf_paged.uninstall()


def _note_choice(seen: list[float], router: Any, args: Any, result: Any) -> None:
    """Note which share of tokens takes the experts with the largest logits."""
    logits, _, experts = result
    best = logits.topk(experts.shape[-1]).indices.sort(-1).values
    seen.append((best == experts.sort(-1).values).all(-1).float().mean().item())
