"""``miles-reset demo``: the main job, its proof, and what naive ways do instead, on a small real model.

Every number that it prints is measured in the run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch.optim import Adagrad, NAdam

from miles_reset.demo.pictures import draw, draw_rates, rates_table, table
from miles_reset.demo.resuming import NEW_RATE, OLD_RATE, POLICY, Resumed, resume
from miles_reset.demo.training import Build, Job, MakeOptimizer, job_of, megatron_jobs, torch_job
from miles_reset.demo.ways import Outcome, Proof, compare_ways, prove
from miles_reset.render import render
from miles_reset.report import ResetReport
from miles_reset.reset import ResetPlan, plan_reset
from miles_reset.testing import same_bits

TRAINING_STEPS = 500
PROOF_STEPS = 5
CHART_STEPS = 20
OTHERS: dict[str, MakeOptimizer] = {
    "NAdam": partial(NAdam, lr=3e-3),
    "Adagrad": partial(Adagrad, lr=0.05, initial_accumulator_value=0.1),
}
"""Optimizers of torch that show what zeroing does where a fresh state is not zero."""


@dataclass(frozen=True)
class Demo:
    """What a run of the demo found.

    Attributes:
        versions: The libraries whose optimizers trained the model.
        fallback: Why Megatron's were not among them; empty if they were.
        losses: The loss of the first and of the last training step.
        plan: The plan of the reset.
        report: What the reset did.
        milliseconds: How long plan and reset took together.
        weights_moved: Whether the reset moved a weight.
        proof: How the reset job compares with a freshly built twin.
        outcomes: What each way to reset does to the next updates of each optimizer.
        chart: Where the chart is; None without matplotlib.
        resumed: How a resume under a policy file went, and what plain loads do.
        resume_chart: Where the chart of the learning rate is; None without matplotlib.
        seconds: How long the run took.
    """

    versions: str
    fallback: str
    losses: tuple[float, float]
    plan: ResetPlan
    report: ResetReport
    milliseconds: float
    weights_moved: bool
    proof: Proof
    outcomes: Sequence[Outcome]
    chart: Path | None
    resumed: Resumed
    resume_chart: Path | None
    seconds: float

    @property
    def proven(self) -> bool:
        """Whether the reset optimizer went on as a fresh one would, and the resumed schedule as it was."""
        return self.proof.same and not self.weights_moved and self.resumed.same

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        first, last = self.losses
        return {
            "versions": self.versions,
            "fallback": self.fallback or None,
            "training": {"steps": TRAINING_STEPS, "first_loss": first, "last_loss": last},
            "plan": self.plan.to_dict(),
            "report": self.report.to_dict(),
            "milliseconds": self.milliseconds,
            "weights_moved": self.weights_moved,
            "proof": asdict(self.proof),
            "ways": [asdict(outcome) for outcome in self.outcomes],
            "chart": str(self.chart) if self.chart else None,
            "resume": asdict(self.resumed),
            "resume_chart": str(self.resume_chart) if self.resume_chart else None,
            "seconds": self.seconds,
        }


def run(console: Console, chart: Path) -> Demo:
    """Train, plan, reset, prove and compare; print each as soon as it is known.

    Args:
        console: Where to print.
        chart: Where to write the chart.
    """
    start = time.perf_counter()
    say = partial(console.print, highlight=False)
    with _one_thread(), contextlib.ExitStack() as stack:
        with console.status("Starting Megatron on the CPU ..."):
            build, fallback = stack.enter_context(_jobs())
        if fallback:
            say(f"Without Megatron ({escape(fallback)}): torch's own SGD and AdamW.", style="yellow")
        with console.status("Training ..."):
            job, losses = _train(build)
        libraries = ["torch"] if fallback else ["megatron-core", "emerging-optimizers", "torch"]
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in libraries)
        size = sum(weight.numel() for weight in job.net.parameters())
        first, last = losses
        say(f"A model of {size:,} weights, trained for {TRAINING_STEPS} steps on the CPU.")
        say(f"Its loss fell from {first:.3f} to {last:.3f}.")
        say(f"With {versions}.")

        trained = build().take_over(job, history=True)
        weights = [weight.detach().clone() for weight in job.weights()]
        before = time.perf_counter()
        plan = plan_reset(job.optimizer)
        report = plan.apply()
        milliseconds = 1e3 * (time.perf_counter() - before)
        moved = not all(map(same_bits, weights, job.weights()))
        say("\n[bold]plan = plan_reset(optimizer)[/] says what a reset would change:")
        say(render(plan))
        summary, *_ = str(report).splitlines()
        counts = ", ".join(f"{count} {outcome}" for outcome, count in report.counts.items())
        say("\n[bold]plan.apply()[/] does it, as reset_optimizer_states(optimizer) does in one call:")
        say(f"{summary} {counts}.")
        say(f"It took {milliseconds:.1f} ms and moved {'WEIGHTS' if moved else 'no weight'}.")

        with console.status("Proving it ..."):
            twin = build().take_over(job, history=False)
            proof = prove(job, twin, TRAINING_STEPS, PROOF_STEPS)
        verdict = "all bits are the same" if proof.same else "THEY DIFFER"
        masters = ", master weights included," if proof.numbers > size else ""
        say(f"\n[bold]The proof[/]: {proof.steps} more steps, beside a freshly built optimizer over a copy.")
        say(f"After each, {proof.numbers:,} weights{masters} are compared: [bold]{verdict}[/].")
        say(f"The largest difference is [bold]{proof.max_difference:g}[/].")

        with console.status("Trying naive ways ..."):
            outcomes = list(compare_ways(build, trained, TRAINING_STEPS, CHART_STEPS))
            stack.close()
            for make in OTHERS.values():
                alone = partial(job_of, make)
                outcomes += compare_ways(alone, _train(alone)[0], TRAINING_STEPS, CHART_STEPS)
        say(f"\n[bold]Naive ways[/], here and with torch's {' and '.join(OTHERS)}. The size of the next")
        say("update if a fresh optimizer's is 1, and how far its direction is off:")
        say("(New tensors: a captured CUDA graph would go on with the old ones.)\n")
        say(table(outcomes))
        with console.status("Drawing ..."):
            drawn = draw(outcomes, chart)
        if drawn:
            say(f"\nChart of the next {CHART_STEPS} updates: [bold]{escape(str(chart))}[/]")
        resumed = resume()
        rates_chart = chart.with_name(f"{chart.stem}-resume.png")
        _say_resume(say, resumed)
        if drawn and draw_rates(resumed, rates_chart):
            say(f"Chart of the learning rate: [bold]{escape(str(rates_chart))}[/]")
        if not drawn:
            say("\nNo charts: matplotlib is not installed. Get it with: pip install 'miles-reset\\[demo]'")
    seconds = time.perf_counter() - start
    return Demo(
        versions, fallback, losses, plan, report, milliseconds, moved, proof, outcomes,
        chart if drawn else None, resumed, rates_chart if drawn else None, seconds,
    )  # fmt: skip


def _say_resume(say: Any, resumed: Resumed) -> None:
    say("\n[bold]A resume under a policy file[/]: a run saved at half of its cosine, a new rate")
    say(f"in the configuration ({NEW_RATE:g}, it was {OLD_RATE:g}), and this policy:\n")
    say(escape(POLICY))
    say("[bold]print(plan_resume(policy, checkpoint, optimizer=..., scheduler=...))[/]\n")
    say(escape(resumed.plan), soft_wrap=True)
    say(rates_table(resumed))
    verdict = "the same rates, to the bit" if resumed.same else "OTHER RATES"
    say(f"Under the policy and in the run that was never interrupted: [bold]{verdict}[/].")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: more only get into each other's way on a model this small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _jobs() -> Iterator[tuple[Build, str]]:
    """Yield what builds the job, and why that is not Megatron's."""
    with contextlib.ExitStack() as session:
        try:
            build = session.enter_context(megatron_jobs())
            build().step(0)
        except Exception as error:  # noqa: BLE001  # whatever keeps Megatron from running is said
            session.close()
            yield torch_job, (str(error) or repr(error)).partition("\n")[0]
        else:
            yield build, ""


def _train(build: Build) -> tuple[Job, tuple[float, float]]:
    """Build a job and train it; return it with its first and its last loss."""
    job = build()
    losses = [job.step(i) for i in range(TRAINING_STEPS)]
    return job, (losses[0], losses[-1])
