"""Adapters in miles' layout, over real Megatron optimizers: whole, safe, and not undone by the first step."""

import argparse
import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron_cpu import FIXTURES, UPSTREAM_WARNINGS, Fixture, build, megatron_session, te_like

from miles_reset import (
    CheckpointError,
    PolicyError,
    ResetError,
    ResumePolicy,
    UnsafeCheckpointError,
    reset_optimizer_states,
)
from miles_reset.cadence import ResetClock
from miles_reset.resume import refresh_masters
from miles_reset_megatron import load_lora_adapter, resume_training, save_lora_adapter

pytestmark = pytest.mark.filterwarnings(*UPSTREAM_WARNINGS)

WRAPPERS = ["fp32_adam", "bf16", "distributed_bf16", "distributed_fused", "distributed_hybrid",
            "distributed_hybrid_aware", "distributed_hybrid_aware_fused", "muon_layer_wise"]  # fmt: skip
RESTORED = ["fp32_adam", "bf16", "distributed_bf16", "distributed_fused", "distributed_fp32",
            "distributed_hybrid_aware", "distributed_hybrid_aware_fused", "muon_layer_wise",
            "hybrid_overlap"]  # fmt: skip
SAVED, STATE = "adapter_megatron_rank0.pt", "training_state_rank0.pt"


def there(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=reason)] if reason else [])
        for name in names
        if not FIXTURES[name].failure("build")
        for reason in [FIXTURES[name].unavailable()]
    ]


def every(name: str) -> bool:
    return True


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    with megatron_session():
        yield


class Run:
    """A run that trains a whole small model as if it were an adapter."""

    def __init__(self, name: str = "bf16", **options: Any) -> None:
        self.fixture: Fixture = build(name)
        self.context = te_like if self.fixture.te_like else contextlib.nullcontext
        self.model = self.fixture.ddp if self.fixture.ddp is not None else self.fixture.net
        self.optimizer = self.fixture.optimizer
        self.scheduler = scheduler(self.optimizer, **options)

    def step(self, i: int, samples: int = 8) -> None:
        self.fixture.step(i)
        self.scheduler.step(samples)

    def save(self, path: Path, iteration: int | None = 7, **options: Any) -> None:
        with self.context():
            save_lora_adapter(
                self.model, path, optimizer=self.optimizer, opt_param_scheduler=self.scheduler,
                iteration=iteration, is_adapter=every, **options,
            )  # fmt: skip

    def load(self, path: Path, **options: Any) -> tuple[bool, int | None]:
        with self.context():
            return load_lora_adapter(
                self.model, path, optimizer=self.optimizer, opt_param_scheduler=self.scheduler,
                is_adapter=every, **options,
            )  # fmt: skip

    def weights(self) -> list[torch.Tensor]:
        return [weight.detach().clone() for weight in self.fixture.net.parameters()]

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for weight in self.fixture.net.parameters():
                weight.fill_(value)

    @property
    def rates(self) -> set[float]:
        return {group["lr"] for group in self.optimizer.param_groups}


def scheduler(optimizer: Any, **options: Any) -> OptimizerParamScheduler:
    given: dict[str, Any] = {
        "init_lr": 0.0, "max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 0, "lr_decay_steps": 3200,
        "lr_decay_style": "linear", "start_wd": 0.01, "end_wd": 0.01, "wd_incr_steps": 3200,
        "wd_incr_style": "constant", "use_checkpoint_opt_param_scheduler": False,
    }  # fmt: skip
    for group in optimizer.param_groups:  # Megatron's own have the rates of the optimizer's configuration
        group["max_lr"] = options.get("max_lr", 1e-3)
        group["min_lr"] = options.get("min_lr", 0.0)
    return OptimizerParamScheduler(optimizer, **{**given, **options})


def equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, two, strict=True))


def contents(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def policy(**choices: Any) -> ResumePolicy:
    return ResumePolicy.from_dict(choices)


@pytest.mark.usefixtures("session")
class TestTheFirstStepGoesOnFromTheLoadedWeights:
    """Case 21: the master weights are refreshed after the adapter was read."""

    @pytest.mark.parametrize("name", there(WRAPPERS))
    def test_with_a_refresh_it_does(self, name: str, tmp_path: Path) -> None:
        saved = Run(name)
        saved.step(0)
        saved.fill(5.0)
        saved.save(tmp_path / "a")
        run = Run(name)
        run.step(0)
        assert run.load(tmp_path / "a", load_optimizer=False) == (True, 7)
        assert all((weight == 5.0).all() for weight in run.weights())
        run.step(1)
        assert all(((weight - 5.0).abs() < 0.05).all() for weight in run.weights())

    def test_a_file_of_miles_that_names_classes(self, tmp_path: Path) -> None:
        run = Run("distributed_hybrid")
        run.step(0)
        state = run.optimizer.state_dict()
        assert state["optimizer"]["param_groups"][0]["cpu_optimizer_cls"] is torch.optim.AdamW
        torch.save(dict(run.model.named_parameters()), tmp_path / SAVED)
        torch.save({"iteration": 3, "optimizer": state, "opt_param_scheduler": None}, tmp_path / STATE)
        assert Run("distributed_hybrid").load(tmp_path, load_optimizer=False) == (True, 3)

    @pytest.mark.parametrize("name", there([name for name in WRAPPERS if name != "fp32_adam"]))
    def test_without_one_it_undoes_the_load(self, name: str) -> None:
        run = Run(name)
        run.step(0)
        run.fill(5.0)  # all that a load which only copies does
        run.step(1)
        assert all((weight.float().mean() - 5.0).abs() > 1 for weight in run.weights())

    @pytest.mark.parametrize("name", there(["bf16", "distributed_bf16"]))
    def test_also_where_the_optimizer_was_saved_as_null(self, name: str, tmp_path: Path) -> None:
        saved = Run(name)
        saved.step(0)
        saved.fill(5.0)
        saved.save(tmp_path, save_optimizer=False)
        run = Run(name)
        run.step(0)
        run.load(tmp_path)
        run.step(1)
        assert all(((weight - 5.0).abs() < 0.05).all() for weight in run.weights())


@pytest.mark.usefixtures("session")
class TestARestoredRunGoesOnAsIfNothingHadHappened:
    @pytest.mark.parametrize("name", there(RESTORED))
    def test_bit_for_bit(self, name: str, tmp_path: Path) -> None:
        one = Run(name)
        for i in range(3):
            one.step(i)
        one.save(tmp_path)
        two = Run(name)
        assert two.load(tmp_path) == (True, 7)
        assert equal(one.weights(), two.weights())
        assert one.rates == two.rates
        for i in range(3, 6):
            one.step(i)
            two.step(i)
        assert equal(one.weights(), two.weights())

    @pytest.mark.parametrize("name", there(RESTORED))
    def test_a_fresh_optimizer_steps_as_a_new_one(self, name: str, tmp_path: Path) -> None:
        one = Run(name)
        for i in range(3):
            one.step(i)
        one.save(tmp_path)
        reset_optimizer_states(one.optimizer)
        two = Run(name)
        two.step(9)
        two.load(tmp_path, load_optimizer=False)
        refresh_masters(one.optimizer)  # those of the saved run have more digits than its weights
        one.step(4)
        two.step(4)
        assert equal(one.weights(), two.weights())
        assert one.rates == two.rates

    def test_moments_that_were_not_saved_are_not_what_memory_holds(self, tmp_path: Path) -> None:
        """Older files of miles have none of a DistributedOptimizer, whose own state_dict leaves them out."""
        one = Run("distributed_bf16")
        one.step(0)
        one.save(tmp_path)
        (tmp_path / "miles_reset_manifest.json").unlink()
        (moments,) = tmp_path.glob("optimizer_param_state_*")
        moments.unlink()
        state = contents(tmp_path / STATE)
        del state["miles_reset"]
        torch.save(state, tmp_path / STATE)
        two = Run("distributed_bf16")
        two.load(tmp_path)
        fresh = Run("distributed_bf16")
        fresh.load(tmp_path, load_optimizer=False)
        for run in (two, fresh):
            run.step(3)
        assert equal(two.weights(), fresh.weights())
        with pytest.raises(
            CheckpointError, match="moments and master weights are in optimizer_param_state_rank0"
        ):
            Run("distributed_bf16").load(tmp_path, policy=policy(optimizer="restore"))

    def test_what_cannot_be_saved_leaves_what_was(self, tmp_path: Path) -> None:
        one = Run("distributed_bf16")
        one.step(0)
        one.save(tmp_path, iteration=7)
        with pytest.raises(CheckpointError, match="cannot be made"):
            Run("distributed_bf16").save(tmp_path, iteration=8)  # Megatron does not save before a step
        assert Run("distributed_bf16").load(tmp_path) == (True, 7)

    def test_moments_that_belong_to_the_file_must_be_there(self, tmp_path: Path) -> None:
        one = Run("distributed_bf16")
        one.step(0)
        one.save(tmp_path)
        (moments,) = tmp_path.glob("optimizer_param_state_*")
        moments.unlink()
        with pytest.raises(CheckpointError, match=moments.name):
            Run("distributed_bf16").load(tmp_path)
        (tmp_path / "miles_reset_manifest.json").unlink()
        with pytest.raises(CheckpointError, match=f"{moments.name}, which is not there"):
            Run("distributed_bf16").load(tmp_path)

    def test_moments_of_another_model_are_refused_before_they_are_scattered(self, tmp_path: Path) -> None:
        one = Run("distributed_bf16")
        one.step(0)
        one.save(tmp_path)
        (moments,) = tmp_path.glob("optimizer_param_state_*")
        state = contents(moments)
        next(iter(state[0].values()))["numel_unpadded"] += 1
        torch.save(state, moments)
        (tmp_path / "miles_reset_manifest.json").unlink()
        two = Run("distributed_bf16")
        before = two.weights()
        with pytest.raises(CheckpointError, match="numbers of buffer 0"):
            two.load(tmp_path)
        assert equal(before, two.weights())


ABSENT = ["null", "key", "file"]


@pytest.mark.usefixtures("session")
class TestWhatComesBack:
    """Case 11: each of optimizer, scheduler and iteration on its own."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, session: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
        path = tmp_path_factory.mktemp("adapter")
        run = Run()
        for i in range(100):
            run.scheduler.step(8)
            if i < 3:
                run.fixture.step(i)
        run.save(path)
        return path

    def changed(self, saved: Path, to: Path, how: str, key: str = "optimizer") -> Path:
        """Return a folder as miles writes it, without what is ours, and with something missing."""
        state = contents(saved / STATE)
        del state["miles_reset"]
        if how == "null":
            state[key] = None
        elif how == "key":
            del state[key]
        to.mkdir()
        torch.save(contents(saved / SAVED), to / SAVED)
        if how != "file":
            torch.save(state, to / STATE)
        return to

    @pytest.mark.parametrize("action", ["restore", "restore-if-present"])
    def test_a_real_state_comes_back(self, action: str, saved: Path) -> None:
        run = Run()
        assert run.load(saved, policy=policy(optimizer=action)) == (True, 7)
        held = contents(saved / STATE)["optimizer"]["optimizer"]["state"]
        inner = run.optimizer.chained_optimizers[0].optimizer
        live = [inner.state[p]["exp_avg"] for group in inner.param_groups for p in group["params"]]
        assert equal(live, [held[i]["exp_avg"] for i in sorted(held)])
        assert (run.scheduler.num_steps, run.rates) == (800, {7.5e-4})

    @pytest.mark.parametrize("switch", [{"load_optimizer": False}, {"policy": policy(optimizer="fresh")}])
    @pytest.mark.parametrize("how", ["real", *ABSENT[:2]])
    def test_skipped_it_is_fresh_and_the_rest_comes_back(
        self, how: str, switch: dict[str, Any], saved: Path, tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:  # fmt: skip
        run = Run()
        run.step(5)
        assert run.load(self.changed(saved, tmp_path / "a", how), **switch) == (True, 7)
        inner = run.optimizer.chained_optimizers[0].optimizer
        assert all(not state["exp_avg"].any() and state["step"] == 0 for state in inner.state.values())
        assert (run.scheduler.num_steps, run.rates) == (800, {7.5e-4})
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize(
        ("how", "said"), [("null", "null in the file"), ("key", "no such key"), ("file", "file is not there")]
    )
    def test_absent_it_is_fresh_and_that_is_said(
        self, how: str, said: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        run = Run()
        run.step(5)
        result = run.load(self.changed(saved, tmp_path / "a", how))
        assert result == (True, None if how == "file" else 7)
        inner = run.optimizer.chained_optimizers[0].optimizer
        assert not any(state["exp_avg"].any() for state in inner.state.values())
        assert run.scheduler.num_steps == (8 if how == "file" else 800)
        warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert any(line.startswith("optimizer of") and said in line for line in warned)

    @pytest.mark.parametrize("how", ABSENT)
    def test_absent_but_required_it_is_refused_and_nothing_changes(
        self, how: str, saved: Path, tmp_path: Path
    ) -> None:
        run = Run()
        run.step(5)
        before = run.weights(), copy.deepcopy(run.optimizer.state_dict()), run.scheduler.state_dict()
        with pytest.raises(CheckpointError, match="optimizer: the policy says restore, and it was not saved"):
            run.load(self.changed(saved, tmp_path / "a", how), policy=policy(optimizer="restore"))
        assert equal(before[0], run.weights())
        assert run.scheduler.state_dict() == before[2]
        now = run.optimizer.state_dict()["optimizer"]["state"]
        assert all(torch.equal(now[i]["exp_avg"], one["exp_avg"])
                   for i, one in before[1]["optimizer"]["state"].items())  # fmt: skip

    @pytest.mark.parametrize("how", ["null", "key"])
    @pytest.mark.parametrize(("key", "left"), [("opt_param_scheduler", (0, 7)), ("iteration", (800, None))])
    def test_scheduler_and_iteration_may_be_absent_too(
        self, how: str, key: str, left: tuple[int, int | None], saved: Path, tmp_path: Path
    ) -> None:
        run = Run()
        assert run.load(self.changed(saved, tmp_path / "a", how, key)) == (True, left[1])
        assert run.scheduler.num_steps == left[0]

    def test_the_policy_may_set_the_iteration(self, saved: Path) -> None:
        assert Run().load(saved, policy=policy(iteration=12)) == (True, 12)
        assert Run().load(saved, policy=policy(iteration="fresh")) == (True, 0)

    def test_hyper_parameters_alone_may_come_back(self, saved: Path) -> None:
        run = Run()
        for group in run.optimizer.param_groups:
            group["betas"] = (0.5, 0.5)
        run.load(saved, policy=policy(optimizer="reset"))
        assert {group["betas"] for group in run.optimizer.param_groups} == {(0.9, 0.999)}
        inner = run.optimizer.chained_optimizers[0].optimizer
        assert not any(state["exp_avg"].any() for state in inner.state.values())

    def test_weights_alone_may_be_loaded_and_saved(self, saved: Path, tmp_path: Path) -> None:
        run = Run()
        assert load_lora_adapter(run.model, saved, is_adapter=every) == (True, 7)
        save_lora_adapter(run.model, tmp_path / "b", is_adapter=every)
        assert not (tmp_path / "b" / STATE).exists()
        assert load_lora_adapter(run.model, tmp_path / "b", is_adapter=every) == (True, None)

    def test_a_switch_and_a_policy_that_disagree_are_refused(self, saved: Path) -> None:
        with pytest.raises(PolicyError, match=r"optimizer: policy says restore, and load_optimizer is False"):
            Run().load(saved, load_optimizer=False, policy=policy(optimizer="restore"))

    def test_miles_reads_what_is_written_here(self, saved: Path) -> None:
        """The files' names, and what is in them under which key."""
        run = Run()
        assert set(contents(saved / SAVED)) == {name for name, _ in run.model.named_parameters()}
        state = contents(saved / STATE)
        assert state["iteration"] == 7
        assert state["opt_param_scheduler"]["num_steps"] == 800
        run.optimizer.load_state_dict(state["optimizer"])

    def test_a_further_part_comes_back_too(self, tmp_path: Path) -> None:
        run, clock = Run(), ResetClock(policy(reset={"every": 4}).reset)
        clock.done(6)
        run.step(0)
        run.save(tmp_path, extras={"reset_clock": clock})
        again = ResetClock(policy(reset={"every": 4}).reset)
        Run().load(tmp_path, extras={"reset_clock": again})
        assert again.last == 6


@pytest.mark.usefixtures("session")
class TestTheSchedule:
    """Cases 12 to 14, with Megatron's own scheduler."""

    @pytest.mark.parametrize(
        ("steps", "samples", "decay", "rate"),
        [(100, 8, 3200, 7.5e-4), (44, 8, 3200, 8.9e-4), (100, 8, 800, 0.0), (30, 16, 960, 5e-4)],
    )
    @pytest.mark.parametrize("load_optimizer", [True, False])
    def test_it_comes_back_once_however_often_it_is_loaded(
        self, steps: int, samples: int, decay: int, rate: float, load_optimizer: bool, tmp_path: Path
    ) -> None:
        one = Run(lr_decay_steps=decay)
        one.fixture.step(0)
        for _ in range(steps):
            one.scheduler.step(samples)
        one.save(tmp_path, iteration=10)
        two = Run(lr_decay_steps=decay)
        for _ in range(2):
            assert two.load(tmp_path, load_optimizer=load_optimizer) == (True, 10)
            assert two.scheduler.num_steps == steps * samples
            assert list(two.rates) == [pytest.approx(rate, rel=1e-12, abs=1e-18)]

    @pytest.mark.parametrize("load_optimizer", [True, False])
    @pytest.mark.parametrize(("here", "saved"), [(0.01, 0.1), (0.3, 0.02)])
    def test_weight_decay_is_right_before_the_first_step(
        self, here: float, saved: float, load_optimizer: bool, tmp_path: Path
    ) -> None:
        one = Run(start_wd=saved, end_wd=saved)
        one.step(0)
        one.save(tmp_path)
        two = Run(start_wd=here, end_wd=here, use_checkpoint_opt_param_scheduler=True)
        two.load(tmp_path, load_optimizer=load_optimizer)
        decays = {group["weight_decay"] for group in two.optimizer.param_groups if group["wd_mult"]}
        assert decays == {saved}

    def test_megatrons_own_load_adds(self, tmp_path: Path) -> None:
        """The trap of case 12 is there: who restores it this way twice has doubled it."""
        one = Run()
        one.scheduler.step(800)
        state = one.scheduler.state_dict()
        one.scheduler.load_state_dict(state)
        assert one.scheduler.num_steps == 1600


class Lora(torch.nn.Module):
    """A frozen base weight, and an adapter of two matrices."""

    def __init__(self, value: float = 1.0, rank: int = 2) -> None:
        super().__init__()
        self.base = torch.nn.Parameter(torch.full((4, 4), 9.0), requires_grad=False)
        self.lora_a = torch.nn.Parameter(torch.full((rank, 4), value))
        self.lora_b = torch.nn.Parameter(torch.full((4, rank), value))

    def values(self) -> set[float]:
        return {float(number) for part in (self.lora_a, self.lora_b) for number in part.detach().flatten()}


class Odd:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Path.cwd() / "made"),)


class TestTheFiles:
    def test_only_the_adapter_is_saved(self, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path)
        assert set(contents(tmp_path / SAVED)) == {"lora_a", "lora_b"}

    def test_a_model_without_an_adapter_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="the model has no adapter"):
            save_lora_adapter(torch.nn.Linear(2, 2), tmp_path / "a")
        assert not (tmp_path / "a" / SAVED).exists()

    @pytest.mark.parametrize(
        ("held", "said"),
        [
            ({"module.lora_a": (2, 4), "module.lora_b": (4, 2)}, "has names that match nothing in the model"),
            ({}, "missing are 'lora_a', 'lora_b', too many are none"),
            ({"lora_a": (2, 4)}, "missing are 'lora_b', too many are none"),
            ({"lora_a": (2, 4), "lora_b": (4, 2), "lora_c": (1,)}, "missing are none, too many are 'lora_c'"),
            (
                {"lora_a": (2, 4), "lora_b": (4, 1)},
                r"has 'lora_b' of shape \(4, 1\); the model's is \(4, 2\)",
            ),
            ({"lora_a": (2, 4), "lora_b": None}, "has a NoneType as 'lora_b'"),
        ],
        ids=["nothing", "empty", "missing", "unknown", "broadcast", "no tensor"],
    )
    def test_what_does_not_fit_is_refused_before_anything_changes(
        self, held: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        tensors = {name: None if shape is None else torch.zeros(shape) for name, shape in held.items()}
        torch.save(tensors, tmp_path / SAVED)
        model = Lora()
        with pytest.raises(CheckpointError, match=said):
            load_lora_adapter(model, tmp_path)
        assert model.values() == {1.0}

    def test_a_cast_is_said(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        save_lora_adapter(Lora(2.0), tmp_path)
        model = Lora().bfloat16()
        load_lora_adapter(model, tmp_path)
        assert (model.values(), model.lora_a.dtype) == ({2.0}, torch.bfloat16)
        assert "were saved as torch.float32 and are loaded as torch.bfloat16" in caplog.text

    def test_chunks_with_equal_names_do_not_overwrite_each_other(self, tmp_path: Path) -> None:
        save_lora_adapter([Lora(1.0), Lora(2.0)], tmp_path)
        chunks = [Lora(0.0), Lora(0.0)]
        load_lora_adapter(chunks, tmp_path)
        assert [chunk.values() for chunk in chunks] == [{1.0}, {2.0}]

    def test_older_files_are_read_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.save(
            {"lora_a": torch.zeros(2, 4), "lora_b": torch.zeros(4, 2)},
            tmp_path / "adapter_megatron_tp0_pp0.pt",
        )
        model = Lora()
        assert load_lora_adapter(model, tmp_path) == (True, None)
        assert model.values() == {0.0}
        assert "older versions of miles" in caplog.text

    @pytest.mark.parametrize(
        "name", ["adapter_config.json", "adapter_model.bin", "adapter_model.safetensors"]
    )
    def test_files_of_peft_are_recognised(
        self, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / name).write_bytes(b"{}")
        assert load_lora_adapter(Lora(), tmp_path) == (False, None)
        assert f"as Hugging Face PEFT writes it ({name})" in caplog.text
        with pytest.raises(CheckpointError, match="Hugging Face PEFT"):
            load_lora_adapter(Lora(), tmp_path, policy=policy())

    def test_a_folder_that_is_not_there_is_the_policys_matter(self, tmp_path: Path) -> None:
        assert load_lora_adapter(Lora(), tmp_path / "none") == (False, None)
        assert load_lora_adapter(Lora(), tmp_path / "none", policy=policy(on_missing="fresh")) == (
            False,
            None,
        )
        with pytest.raises(CheckpointError, match="is not there"):
            load_lora_adapter(Lora(), tmp_path / "none", policy=policy())

    def test_what_is_no_folder_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        for name in ("file", "loop"):
            with pytest.raises(CheckpointError, match=f"{name} cannot be opened"):
                load_lora_adapter(Lora(), tmp_path / name)

    def test_a_flipped_bit_of_an_adapter_is_refused(self, tmp_path: Path) -> None:
        model = Lora(3.0)
        save_lora_adapter(model, tmp_path, iteration=3)
        path = tmp_path / SAVED
        whole = bytearray(path.read_bytes())
        bits = next(iter(contents(path).values())).numpy().tobytes()
        whole[whole.index(bits) + 1] ^= 4
        path.write_bytes(whole)
        live = Lora()
        before = live.values()
        with pytest.raises(CheckpointError, match="differs from its checksum"):
            load_lora_adapter(live, tmp_path)
        assert live.values() == before

    def test_a_training_state_without_its_adapter_is_refused(self, tmp_path: Path) -> None:
        torch.save({"iteration": 3}, tmp_path / STATE)
        with pytest.raises(CheckpointError, match=f"{SAVED} is not there; the folder has {STATE}"):
            load_lora_adapter(Lora(), tmp_path)

    def test_more_ranks_than_there_are_now_are_refused(self, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path, iteration=3)
        (tmp_path / "miles_reset_manifest.json").unlink()
        torch.save(contents(tmp_path / SAVED), tmp_path / "adapter_megatron_rank3.pt")
        with pytest.raises(CheckpointError, match="was saved by at least 4 ranks, and this run has 1"):
            load_lora_adapter(Lora(), tmp_path)

    @pytest.mark.parametrize("where", ["manifest", "file"])
    def test_another_world_size_is_refused(self, where: str, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path, iteration=3)
        manifest = tmp_path / "miles_reset_manifest.json"
        if where == "manifest":
            manifest.write_text(manifest.read_text().replace('"world_size": 1', '"world_size": 2'))
        else:
            manifest.unlink()
            state = contents(tmp_path / STATE)
            state["miles_reset"]["world_size"] = 2
            torch.save(state, tmp_path / STATE)
        with pytest.raises(CheckpointError, match="was saved by 2 ranks, and this run has 1"):
            load_lora_adapter(Lora(), tmp_path)

    @pytest.mark.usefixtures("session")
    def test_another_layout_is_refused(self, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path, iteration=3)
        manifest = tmp_path / "miles_reset_manifest.json"
        assert json.loads(manifest.read_text())["told"]["layout"] == {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
        assert load_lora_adapter(Lora(), tmp_path) == (True, 3)
        manifest.write_text(manifest.read_text().replace('"tp": 1', '"tp": 2'))
        with pytest.raises(CheckpointError, match=r"was saved with tp=2 pp=1 .*, and this run has tp=1 pp=1"):
            load_lora_adapter(Lora(), tmp_path)

    def test_a_manifest_that_does_not_fit_is_refused(self, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path, iteration=3)
        manifest, kept = tmp_path / "miles_reset_manifest.json", contents(tmp_path / STATE)
        torch.save({**kept, "iteration": 4}, tmp_path / STATE)  # of equal size
        whole = manifest.read_text()
        size = json.loads(whole)["files"][STATE]["bytes"]
        manifest.write_text(whole.replace(str(size), str((tmp_path / STATE).stat().st_size)))
        with pytest.raises(CheckpointError, match=r"is 4; miles_reset_manifest\.json says 3"):
            load_lora_adapter(Lora(), tmp_path)
        torch.save({**kept, "more": "x" * 500}, tmp_path / STATE)
        with pytest.raises(CheckpointError, match=r"bytes; miles_reset_manifest\.json says"):
            load_lora_adapter(Lora(), tmp_path)
        (tmp_path / STATE).unlink()
        with pytest.raises(CheckpointError, match=f"{STATE} is named in miles_reset_manifest"):
            load_lora_adapter(Lora(), tmp_path)
        for text in (
            "",
            "[]",
            '{"version": 2}',
            '{"version": 1, "files": {"../a": {"bytes": 1, "rank": 0}}}',
        ):
            manifest.write_text(text)
            with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
                load_lora_adapter(Lora(), tmp_path)

    @pytest.mark.parametrize("name", [SAVED, STATE])
    @pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
    def test_a_torn_file_is_refused_with_its_path(self, name: str, part: float, tmp_path: Path) -> None:
        save_lora_adapter(Lora(), tmp_path, iteration=3)
        (tmp_path / "miles_reset_manifest.json").unlink()
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: int(part * len(whole))])
        model = Lora(0.0)
        with pytest.raises(CheckpointError, match=name):
            load_lora_adapter(model, tmp_path)
        assert model.values() == {0.0}

    @pytest.mark.parametrize("name", [SAVED, STATE])
    def test_nothing_in_a_hostile_file_runs(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        save_lora_adapter(Lora(), tmp_path / "a", iteration=3)
        (tmp_path / "a" / "miles_reset_manifest.json").unlink()
        torch.save({**contents(tmp_path / "a" / name), "optimizer": Odd()}, tmp_path / "a" / name)
        with pytest.raises(UnsafeCheckpointError, match="mkdir"):
            load_lora_adapter(Lora(), tmp_path / "a", load_optimizer=False)
        assert not (tmp_path / "made").exists()

    def test_an_error_while_the_plan_is_carried_out_puts_the_weights_back(self, tmp_path: Path) -> None:
        optimizer = torch.optim.AdamW(Lora(2.0).parameters())
        save_lora_adapter(Lora(2.0), tmp_path, optimizer=optimizer, iteration=3)
        model = Lora(0.0)

        class Fails:
            def load_state_dict(self, state: Any) -> None:
                raise RuntimeError("no")

        state = contents(tmp_path / STATE)
        state["miles_reset"]["extras"] = {"data": {}}
        torch.save(state, tmp_path / STATE)
        (tmp_path / "miles_reset_manifest.json").unlink()
        with pytest.raises(ResetError, match=r"failed midway: RuntimeError\('no'\)"):
            load_lora_adapter(model, tmp_path, extras={"data": Fails()})
        assert model.values() == {0.0}

    def test_what_is_not_restored_is_not_read(self, tmp_path: Path) -> None:
        """Case 22, smaller: 32 MB of moments next to an adapter of 64 bytes."""
        big = torch.nn.Parameter(torch.zeros(4_000_000))
        big.grad = torch.ones_like(big)
        optimizer = torch.optim.AdamW([big])
        optimizer.step()
        save_lora_adapter(Lora(), tmp_path, optimizer=optimizer, iteration=3)
        assert (tmp_path / STATE).stat().st_size > 32_000_000
        live = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4_000_000))])
        before = read_bytes()
        assert load_lora_adapter(Lora(), tmp_path, optimizer=live, load_optimizer=False) == (True, 3)
        assert read_bytes() - before < 640_000


def read_bytes() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("rchar"):
                return int(line.split()[1])
    return 0


KILLED = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path

    import torch

    from miles_reset_megatron import save_lora_adapter

    torch.set_num_threads(1)


    def save(folder, value):
        model = torch.nn.Module()
        model.lora_a = torch.nn.Parameter(torch.full((3,), float(value)))
        optimizer = torch.optim.SGD([model.lora_a], lr=0.1, momentum=0.9)
        optimizer.state[model.lora_a]["momentum_buffer"] = torch.full((3,), float(value))
        save_lora_adapter(model, folder, optimizer=optimizer, iteration=value)


    def die_at(stage, when, names=("fsync", "replace", "unlink")):
        left = stage

        def deadly(original):
            def call(*args, **keywords):
                nonlocal left
                left -= 1
                if left < 0 and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                result = original(*args, **keywords)
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result
            return call

        if when == "amid":
            original = torch.save

            def torn(content, file):
                nonlocal left
                left -= 1
                if left < 0:
                    file.write(b"PK" * 400)
                    file.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                original(content, file)

            torch.save = torn
            return
        for name in names:
            setattr(os, name, deadly(getattr(os, name)))


    def forked(folder, value, *death):
        pid = os.fork()
        if not pid:
            die_at(*death)
            save(folder, value)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        return status


    base = Path(sys.argv[1])
    for kind in ("over", "new", "twice"):
        for when in ("before", "after", "amid"):
            for stage in range(40):
                folder = base / f"{kind}-{when}-{stage}"
                if kind != "new":
                    save(folder, 1)
                if kind == "twice":  # killed when it counts, and no file has its own name yet
                    assert os.WIFSIGNALED(forked(folder, 2, 1, "before", ["replace"]))
                status = forked(folder, 3, stage, when)
                if not os.WIFSIGNALED(status):
                    assert os.WEXITSTATUS(status) == 0
                    (folder / "survived").touch()
                    break
    """
)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
def test_a_kill_at_any_moment_leaves_the_old_save_whole_or_the_new_one(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, timeout=100)
    old = {"over": 1, "new": 0, "twice": 2}
    outcomes: dict[str, list[int]] = {kind: [] for kind in old}
    for folder in sorted(tmp_path.iterdir()):
        kind = folder.name.split("-")[0]
        model = torch.nn.Module()
        model.lora_a = torch.nn.Parameter(torch.zeros(3))
        optimizer = torch.optim.SGD([model.lora_a], lr=0.1, momentum=0.9)
        try:
            _, iteration = load_lora_adapter(model, folder, optimizer=optimizer)
        except CheckpointError as error:
            if kind != "new" or "holds a save that was not finished" not in str(error):
                raise
            iteration = None
        outcomes[kind].append(iteration or 0)
        assert iteration == 3 or not (folder / "survived").exists()
        if iteration is None:  # killed before the first save counted
            continue
        buffer = optimizer.state[model.lora_a]["momentum_buffer"]
        assert model.lora_a.tolist() == buffer.tolist() == [float(iteration)] * 3, folder
        save_lora_adapter(model, folder, iteration=9)  # the next save clears up
        assert load_lora_adapter(model, folder) == (True, 9)
        left = {path.name for path in folder.iterdir()} - {"survived"}
        assert left == {SAVED, STATE, "miles_reset_manifest.json"}
    for kind, iterations in outcomes.items():
        assert set(iterations) == {old[kind], 3}
        assert iterations.count(old[kind]) > 5 < iterations.count(3)


@pytest.mark.usefixtures("session")
class TestAtTheTrainersPlace:
    def arguments(self, **given: Any) -> argparse.Namespace:
        return argparse.Namespace(**{"load": None, "no_load_optim": False, **given})

    def megatron(self, path: Path, run: Run, iteration: int = 11) -> Path:
        """Write Megatron's own layout, of one rank."""
        folder = path / f"iter_{iteration:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        content = {
            "iteration": iteration,
            "model": run.fixture.net.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "opt_param_scheduler": run.scheduler.state_dict(),
            "args": argparse.Namespace(tensor_model_parallel_size=1),
        }
        torch.save(content, folder / "model_optim_rng.pt")
        (path / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return path

    def load_checkpoint(self, path: Path, args: Any, seen: list[Any]) -> Any:
        """Stand in for Megatron's: what --no-load-optim leaves out is the scheduler too."""

        def load(model: Any, optimizer: Any, opt_param_scheduler: Any) -> tuple[int, int]:
            seen.append((args.no_load_optim, opt_param_scheduler is not None))
            content = torch.load(next(path.glob("iter_*/mp_rank_00/*.pt")), weights_only=False)
            model.module.load_state_dict(content["model"])
            if args.no_load_optim:
                optimizer.reload_model_params()
            else:
                optimizer.load_state_dict(content["optimizer"])
                if opt_param_scheduler is not None:
                    opt_param_scheduler.load_state_dict(content["opt_param_scheduler"])
            return content["iteration"], 0

        return load

    @pytest.mark.parametrize("no_load_optim", [True, False])
    @pytest.mark.parametrize("fresh_schedule", [True, False])
    def test_megatron(self, no_load_optim: bool, fresh_schedule: bool, tmp_path: Path) -> None:
        one = Run()
        for i in range(3):
            one.step(i, 100)
        path = self.megatron(tmp_path / "c", one)
        args = self.arguments(load=str(path), no_load_optim=no_load_optim)
        if fresh_schedule:
            (tmp_path / "policy.toml").write_text('scheduler = "fresh"')
            args.resume_policy = str(tmp_path / "policy.toml")
        two, seen = Run(max_lr=1e-3), []  # type: ignore[var-annotated]
        load = self.load_checkpoint(path, args, seen)
        assert resume_training(args, two.model, two.optimizer, two.scheduler, load=load) == 11
        assert seen[0][0] == no_load_optim
        assert args.no_load_optim == no_load_optim
        assert two.scheduler.num_steps == (0 if fresh_schedule else 300)
        expected = 1e-3 if fresh_schedule else 1e-3 * (1 - 300 / 3200)
        assert list(two.rates) == [pytest.approx(expected)]
        assert equal(one.weights(), two.weights())
        if no_load_optim:
            reset_optimizer_states(one.optimizer)
            one.optimizer.reload_model_params()
        if fresh_schedule:
            one.scheduler.num_steps = 0
            one.scheduler.step(0)
        for run in (one, two):
            run.step(7)
        assert equal(one.weights(), two.weights())

    def test_an_adapter_beats_its_base(self, tmp_path: Path) -> None:
        saved = Run()
        saved.step(0, 80)
        path = self.megatron(tmp_path / "base", saved)
        saved.fill(5.0)
        saved.save(tmp_path / "adapter", iteration=4)
        args = self.arguments(load=str(path), lora_adapter_path=str(tmp_path / "adapter"), no_load_optim=True)
        run, seen = Run(), []  # type: ignore[var-annotated]
        load = self.load_checkpoint(path, args, seen)

        def base(model: Any, optimizer: Any, opt_param_scheduler: Any) -> Any:
            return load(model, run.optimizer, None)

        iteration = resume_training(
            args, run.model, run.optimizer, run.scheduler, load=base, is_adapter=every
        )
        assert iteration == 4
        assert run.scheduler.num_steps == 80
        run.step(1)
        assert all(((weight - 5.0).abs() < 0.05).all() for weight in run.weights())

    def test_a_fresh_start_loads_the_weights_alone(self, tmp_path: Path) -> None:
        saved = Run()
        saved.step(0, 80)
        path = self.megatron(tmp_path / "ref", saved)
        args = self.arguments(load=str(tmp_path / "nothing"))
        run, seen = Run(), []  # type: ignore[var-annotated]
        args.no_load_optim = True
        load = self.load_checkpoint(path, args, seen)
        assert resume_training(args, run.model, run.optimizer, run.scheduler, load=load) == 0
        assert run.scheduler.num_steps == 0
        assert equal(saved.weights(), run.weights())

    def test_a_reset_that_is_due_at_the_resume_is_done_once(self, tmp_path: Path) -> None:
        """The run was killed after it saved rollout 7, the eighth, and before it reset."""
        saved = Run()
        saved.step(0)
        saved.save(tmp_path / "a", iteration=7)
        schedule = policy(reset={"every": 4, "unit": "rollout"}).reset
        args = self.arguments(load=str(tmp_path / "a"))
        run, lines = Run(), []  # type: ignore[var-annotated]
        clock = ResetClock(schedule, log=lines.append)
        assert resume_training(
            args, run.model, run.optimizer, run.scheduler, clock=clock, is_adapter=every
        ) == 7  # fmt: skip
        assert lines[0].startswith("optimizer reset at rollout 8")
        inner = run.optimizer.chained_optimizers[0].optimizer
        assert not any(state["exp_avg"].any() for state in inner.state.values())
        assert clock(run.optimizer, 8, unit="rollout") is None
        assert clock(run.optimizer, 9, unit="rollout") is None
        assert len(lines) == 1
