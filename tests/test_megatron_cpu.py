"""Show that the optimizers of `megatron_cpu` are real, repeatable, and leave nothing behind."""

from collections.abc import Callable, Iterator

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron.core.optimizer
from fused_adam import FusedAdamLike
from megatron.core import parallel_state
from megatron_cpu import (
    FIXTURES,
    UPSTREAM_WARNINGS,
    Upstream,
    build,
    cases,
    group_holders,
    megatron_session,
    te_like,
)

pytestmark = pytest.mark.filterwarnings(*UPSTREAM_WARNINGS)

FAILURES = [
    pytest.param(name, failure, id=f"{name}-{failure.stage}")
    for name, recipe in FIXTURES.items()
    if not recipe.unavailable()
    for stage in ("build", "step", "round_trip")
    if (failure := recipe.failure(stage))
]


def clones(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(*pair) for pair in zip(one, other, strict=True)]


@pytest.fixture(scope="class")
def session() -> Iterator[None]:
    with megatron_session():
        yield


@pytest.mark.usefixtures("session")
class TestInOneSession:
    """What needs a session; to start one takes longer than to build an optimizer."""

    @pytest.mark.parametrize("name", cases("build", "step"))
    def test_steps_move_every_weight(self, name: str) -> None:
        fixture = build(name)
        before = clones(fixture.weights())
        for i in range(3):
            fixture.step(i)
        after = fixture.weights()
        assert all(weight.isfinite().all() for weight in after)
        has_weights = bool(fixture.optimizer.param_groups)
        assert same(before, after) == [not has_weights] * len(before)

    @pytest.mark.parametrize("name", cases("build", "step"))
    def test_twins_take_the_same_steps(self, name: str) -> None:
        twins = build(name), build(name)
        for twin in twins:
            twin.step(4)
            twin.step(2)
        assert all(same(twins[0].weights(), twins[1].weights()))

    @pytest.mark.parametrize("name", cases("build", "step", "round_trip"))
    def test_round_trip_keeps_the_weights_and_can_be_followed_by_a_step(self, name: str) -> None:
        fixture = build(name)
        fixture.step(0)
        before = clones(fixture.weights())
        fixture.round_trip()
        assert all(same(before, fixture.weights()))
        fixture.step(1)
        assert not any(same(before, fixture.weights()))

    @pytest.mark.parametrize(("name", "failure"), FAILURES)
    def test_upstream_failure_is_still_there(self, name: str, failure: Upstream) -> None:
        attempt = failing_call(name, failure)
        with pytest.raises(failure.error, match=failure.match):
            attempt()

    @pytest.mark.parametrize(
        ("name", "on_cpu", "on_gpu"),
        [
            ("hybrid_all_offloaded", 5, 0),
            ("hybrid_none_offloaded", 0, 1),
            ("hybrid_overlap", 2, 1),
            ("hybrid_no_overlap", 1, 1),
        ],
    )
    def test_hybrid_optimizer_splits_as_on_a_gpu(self, name: str, on_cpu: int, on_gpu: int) -> None:
        optimizer = build(name).optimizer
        assert len(optimizer.cpu_optimizers) == on_cpu
        assert len(optimizer.sub_optimizers) == on_cpu + on_gpu

    def test_fake_cuda_keeps_track_of_both_sides(self) -> None:
        born = torch.ones(2, dtype=torch.bfloat16, device="cuda")
        assert born.is_cuda
        assert born.type() == "torch.cuda.BFloat16Tensor"
        offloaded = born.detach().cpu().pin_memory()
        assert offloaded.data_ptr() != born.data_ptr()
        assert not offloaded.float().is_cuda
        assert offloaded.type() == "torch.BFloat16Tensor"
        assert not torch.ones(2, device="cpu", pin_memory=True).is_cuda
        assert not born.to("cpu", torch.float32).is_cuda
        assert offloaded.to("cuda").is_cuda
        assert offloaded.cuda().is_cuda

    def test_te_like_is_over_when_the_fixture_is_built(self) -> None:
        (leaf,) = group_holders(build("distributed_fused").optimizer)
        assert isinstance(leaf, FusedAdamLike)
        assert megatron.core.optimizer.Adam is torch.optim.AdamW
        with te_like():
            assert megatron.core.optimizer.Adam is FusedAdamLike
        assert megatron.core.optimizer.Adam is torch.optim.AdamW


def failing_call(name: str, failure: Upstream) -> Callable[[], object]:
    """Do what comes before the failure, and return what fails."""
    if failure.stage == "build":
        return lambda: build(name)
    fixture = build(name)
    if failure.stage == "step":
        return lambda: fixture.step(0)
    if not FIXTURES[name].failure("step"):
        fixture.step(0)
    return fixture.round_trip


@pytest.mark.parametrize("capturable", [False, True])
def test_fused_adam_like_steps_as_adamw_and_counts_in_the_group(capturable: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, 5, generator=generator)
    params = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    fused = FusedAdamLike(params[:1], lr=0.1, weight_decay=0.1, capturable=capturable)
    adamw = torch.optim.AdamW(params[1:], lr=0.1, weight_decay=0.1)
    assert "step" not in fused.param_groups[0]
    for grad in grads:
        for param, optimizer in zip(params, (fused, adamw), strict=True):
            param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(*params)
    assert fused.state[params[0]].keys() == {"exp_avg", "exp_avg_sq"}
    step = fused.param_groups[0]["step"]
    assert step == len(grads)
    assert isinstance(step, torch.Tensor) == capturable


def test_session_undoes_all_that_it_does() -> None:
    def look() -> list[object]:
        names = ("Stream", "stream", "current_stream", "current_device", "synchronize")
        return [
            *(getattr(torch.cuda, name) for name in names),
            torch.distributed.all_gather,
            torch.distributed.is_initialized(),
            parallel_state.is_initialized(),
            torch.ones(1).is_cuda,
            torch.get_num_threads(),
        ]

    before = look()
    with megatron_session():
        within = look()
    assert look() == before
    assert not any(here == there for here, there in zip(before[:-1], within[:-1], strict=True))


def test_session_is_undone_after_an_error() -> None:
    with pytest.raises(KeyError, match="no such fixture"), megatron_session():
        build("no such fixture")
    assert not torch.distributed.is_initialized()
    assert not torch.ones(1).is_cuda
