"""Encoders over images that are not known: which run, what is kept, and where all images run as in stock."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from threads import run_threads
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_paged.models.images import items
from hf_paged.models.images.known_images import KnownImages

A, B, C, BLANK = (torch.full((3,), value) for value in (1.0, 2.0, 3.0, 0.0))


class Body(nn.Module):
    """Makes two rows of each image; ``ran``: images of each run of its encoder. ``lists``: rows come in a list."""

    lists = False

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.ran = nn.Parameter(torch.tensor(2.0)), []

    def get_image_features(self, pixel_values: torch.Tensor, sizes: Any = None, **kwargs: Any) -> Any:
        self.ran.append(pixel_values[:, 0].tolist())
        rows = self.rows(pixel_values)
        found = list(rows) if self.lists else rows
        return BaseModelOutputWithPooling(last_hidden_state=rows.sum(1), pooler_output=found)

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return (pixels * self.weight)[:, None].repeat(1, 2, 1)


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.model, self.device = body, torch.device("cpu")


def executor_of(model: Model) -> Any:
    """Return what `KnownImages` reads of an executor, without numbers that tell of changes."""
    watch = SimpleNamespace(structure=lambda _: 1)
    return SimpleNamespace(source=model, model=model, watch=watch, contents=lambda: 2, state_key=lambda: b"",
                           tensors=lambda: SimpleNamespace(weights=list(model.parameters()), buffers=[]))


class Case:
    """A model with known images; ``run`` encodes images, and returns those of each run of the encoder."""

    def __init__(self, body: Body | None = None, **options: Any) -> None:
        self.body = Body() if body is None else body
        self.model = Model(self.body)
        self.executor = executor_of(self.model)
        self.known = KnownImages(self.executor, **options)

    @torch.no_grad()
    def run(self, *images: torch.Tensor, **kwargs: Any) -> list[list[float]]:
        pixels = torch.stack(images)
        expected = self.body.get_image_features(pixels)
        self.body.ran.clear()
        self.output = self.known.view(self.model, "model").model.get_image_features(pixels, **kwargs)
        for own, stock in zip(self.output.pooler_output, expected.pooler_output, strict=True):
            assert torch.equal(own, stock)
        return [*self.body.ran]


def test_equal_images_run_once_and_are_kept():
    case = Case()
    assert case.run(A, B) == [[1, 2]]
    assert case.run(C, C, A, C) == [[3], [3, -3][::-1]]  # and the proof, that another image beside changes nothing
    assert case.run(A, B, C) == [] and case.run(A, A) == []
    assert (case.known.num_encoded, case.known.num_reused) == (2 + 3, 3 + 3 + 2)
    assert case.known.num_bytes == 3 * (A.nbytes + 2 * A.nbytes)
    case.known.clear()
    assert case.known.num_bytes == 0 and case.run(A, B) == [[1, 2]]
    assert "get_image_features" not in vars(case.body) and case.model.model is case.body


def test_the_proof_has_another_number_of_images():
    assert Case().run(A, A, B, C) == [[1, 2, 3], [-1, 1]] and Case().run(A, A, B) == [[1, 2], [-1, 1, -1]]


@torch.no_grad()
def test_an_image_without_finite_rows_proves_nothing():
    case = Case()
    for images, num_runs in (((A * torch.nan, A * torch.nan), 2), ((A, A), 2), ((A, B, A), 1)):
        case.body.ran.clear()
        made = case.known.view(case.model, "model").model.get_image_features(torch.stack(images)).pooler_output
        assert torch.equal(made[0].nan_to_num(7), (images[0] * 2)[None].repeat(2, 1).nan_to_num(7))
        assert len(case.body.ran) == num_runs


class Mixing(Body):
    """Its images see each other."""

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().rows(pixels) + pixels.mean(0)


class Counting(Body):
    """Its rows depend on the number of images."""

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().rows(pixels) * len(pixels)


class Placing(Body):
    """Its rows depend on the place of an image."""

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().rows(pixels) + torch.arange(len(pixels))[:, None, None]


@pytest.mark.parametrize("body", [Mixing, Counting, Placing])
@pytest.mark.parametrize("images", [(A, A), (A, B, A, B), (A, A, B, C)])
def test_encoders_whose_images_depend_on_others(body, images):
    case = Case(body())
    case.run(*images)
    for _ in range(2):
        assert case.run(*images) == [[image[0].item() for image in images]]
        assert case.run(A) == [[1]]


class LeavingOut(Body):
    """Takes several images in a row of pixels, and leaves blank ones out."""

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().rows(pixels.view(-1, 3)[pixels.view(-1, 3).any(1)])


def test_encoders_that_leave_blank_images_out():
    """As many rows as images may be those of others."""
    two, none = torch.cat([A, B]), torch.cat([BLANK, BLANK])
    case = Case(LeavingOut())
    for images in ((two, none, two, none), (two, two, none, none), (none, none, two, two), (two, none)):
        case.run(*images)
    assert case.known.num_reused == 0
    assert case.run(two, two)[-1] == [1, 1] and case.run(two, two) == [[1, 1]]
    case = Case()
    assert case.run(A, A) == [[1], [-1, 1]] and case.run(BLANK, BLANK) == [[0], [0, 0]]


class Drawing(Body):
    """Drops out in train mode."""

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().rows(pixels), training=self.training)


def test_encoders_that_draw_random_numbers():
    case = Case(Drawing())
    case.body.train()
    seeds = iter(range(100))

    def run(*images: torch.Tensor) -> list[list[float]]:
        torch.manual_seed(seed := next(seeds))
        pixels = torch.stack(images)
        with torch.no_grad():
            expected = case.body.get_image_features(pixels).pooler_output
            after = torch.get_rng_state()
            case.body.ran.clear()
            torch.manual_seed(seed)
            found = case.known.view(case.model, "model").model.get_image_features(pixels).pooler_output
        assert torch.equal(found, expected) and torch.equal(torch.get_rng_state(), after)
        return [*case.body.ran]

    with torch.random.fork_rng(devices=[]):
        assert run(A, A, B) == [[1, 2], [1, 1, 2]]
        assert run(A, A, B) == [[1, 1, 2]] and run(A) == [[1]] and run(A) == [[1]]
        case.body.eval()
        assert run(A, A) == [[1], [-1, 1]] and run(A) == []


def test_a_checksum_is_compared():
    case = Case()
    assert case.run(A) == [[1]] and case.run(A)[-1] == [-1, 1] and case.run(A) == []
    case.body.weight.data.mul_(2)
    assert case.run(A) == [[1]] and case.run(A) == [] and case.known.num_bytes == 3 * A.nbytes


@pytest.mark.parametrize("change", [
    lambda case: setattr(case.executor.watch, "structure", lambda _: 3),
    lambda case: setattr(case.executor, "contents", lambda: 3),
    lambda case: setattr(case.executor, "state_key", lambda: b"another"),
])
def test_a_change_that_is_known_forgets_all(change):
    case = Case()
    assert [case.run(A), case.run(B)] == [[[1]], [[2]]]
    change(case)
    assert case.run(B) == [[2]] and case.known.num_bytes == 3 * A.nbytes


def test_autocast_of_the_thread():
    case = Case()
    assert [case.run(A), case.run(A), case.run(A)] == [[[1]], [[-1, 1]], []]
    with torch.autocast("cpu", torch.bfloat16):
        assert case.run(A) == [[1]] and case.run(A) == []
    assert case.run(A) == [[1]]


class Casting(Body):
    """Its rows have autocast's dtype; ``beside`` runs in every call."""

    def beside(self) -> None:
        pass

    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        self.beside()
        is_cast = torch.is_autocast_enabled("cpu")
        return super().rows(pixels).to(torch.get_autocast_dtype("cpu") if is_cast else pixels.dtype)


def test_a_call_beside_under_another_autocast():
    """What a call without autocast makes is not kept for those under it, though one began in the meantime."""
    case = Case(Casting())
    case.run(C)
    case.run(C)

    def dtype_of(image: torch.Tensor) -> torch.dtype:
        with torch.no_grad():
            encode = case.known.view(case.model, "model").model.get_image_features
            return encode(image[None]).pooler_output.dtype

    def under_autocast(image: torch.Tensor) -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return dtype_of(image)

    def once() -> None:
        del case.body.beside
        other = threading.Thread(target=under_autocast, args=(B,))
        other.start()
        other.join()

    case.body.beside = once
    assert dtype_of(A) == torch.float32 and under_autocast(A) == torch.bfloat16


def test_the_image_used_the_longest_ago_goes_first():
    case = Case(most_bytes=2 * 3 * A.nbytes)
    case.run(A)
    case.run(A)
    assert [case.run(image) for image in (B, A, C, A, B)] == [[[2]], [], [[3]], [], [[2]]]
    assert Case(most_bytes=3 * A.nbytes - 1).run(A) == [[1]]
    case = Case(most_bytes=3 * A.nbytes - 1)
    assert [case.run(A), case.run(A)] == [[[1]], [[1]]] and case.known.num_bytes == 0
    none = Case(most_bytes=0)
    assert [none.run(A), none.run(A), none.run(A, A)] == [[[1]], [[1]], [[1], [-1, 1]]]


def test_keys_alone_are_not_believed(monkeypatch):
    monkeypatch.setattr(items.Items, "keys", property(lambda self: ["one"] * len(self)))
    case = Case()
    assert case.run(A, B) == [[1, 2]] and case.run(C, A, C, B)[0] == [3] and case.run(A, C, B, A) == []


@pytest.mark.parametrize("lists", [True, False])
def test_what_is_handed_out_may_be_written_to(lists):
    case = Case()
    case.body.lists = lists
    for expected in ([[1]], [[-1, 1]], [], []):
        assert case.run(A) == expected
        for rows in case.output.pooler_output:
            rows.zero_()


def test_arguments_of_other_kinds_have_other_images():
    case = Case()
    case.run(A)
    assert case.run(A, sizes=1) == [[1]] and case.run(A, further="x") == [[1]] and case.run(A, sizes=1)[-1] == [-1, 1]
    assert case.run(A, sizes=torch.ones(1, 2)) == [[1]] and case.run(A, sizes=[4]) == [[1]]


class Refusing(Body):
    def rows(self, pixels: torch.Tensor) -> torch.Tensor:
        if len(pixels) != self.expected:
            raise ValueError(f"{len(pixels)} images")
        return super().rows(pixels)


def test_errors_are_about_all_images():
    body = Refusing()
    body.expected = 2
    case = Case(body)
    assert case.run(A, A) == [[1], [1, 1]]
    with pytest.raises(ValueError, match="3 images"), torch.no_grad():
        case.known.view(case.model, "model").model.get_image_features(torch.stack([A, A, A]))


def test_further_fields_are_of_all_images_and_end_it():
    case = Case()
    case.run(A)
    case.run(A)
    assert case.run(A, B, A) == [[2]]
    assert torch.equal(1 + case.output.last_hidden_state, 1 + 4 * torch.stack([A, B, A]))
    assert case.body.ran == [[2], [1, 2, 1]] and case.run(A, B) == [[1, 2]]


def test_arguments_that_the_method_does_not_take():
    encode = Case().known.view(Model(Body()), "model").model.get_image_features
    with pytest.raises(TypeError, match=r"get_image_features\(\) missing 1 required positional argument"):
        encode()


def test_inference_mode():
    case = Case()
    with torch.inference_mode():
        assert [case.run(A), case.run(A)] == [[[1]], [[-1, 1]]]
    assert case.run(A, A) == [] and case.run(B, A) == [[2]]
    with torch.inference_mode():
        assert case.run(A, B) == []


def test_with_gradients_all_images_run():
    case = Case()
    encode = case.known.view(case.model, "model").model.get_image_features
    output = encode(torch.stack([A, A]))
    assert output.pooler_output.requires_grad and case.body.ran == [[1, 1]] and case.known.num_bytes == 0


def test_threads_share_what_is_known():
    case = Case()
    case.run(A)
    case.run(A)
    encode = case.known.view(case.model, "model").model.get_image_features
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with torch.no_grad():
                for number in range(50):
                    pixels = torch.stack([A, torch.full((3,), float(number % 7)), A])
                    assert torch.equal(encode(pixels).pooler_output, case.body.rows(pixels))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    run_threads(threads)
    assert not failed
