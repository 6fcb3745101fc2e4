"""Build and step real megatron-core optimizers on a CPU.

    with megatron_session():
        fixture = build("distributed_bf16")
        fixture.step(0)

`FIXTURES` names every optimizer tree that the tests meet. A `Recipe` says what it needs and where
Megatron itself fails: tests assert such a failure, so that a version without it is noticed.

No Megatron source is changed. Within a session tensors answer as in `fake_cuda`, and
``torch.distributed.all_gather`` takes tensors of uneven sizes, which gloo does not. Where Transformer
Engine or apex is installed, Megatron takes their kernels, and those refuse CPU tensors.
"""

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal
from unittest import mock

import megatron.core
import pytest
import torch
from fake_cuda import fake_cuda
from fused_adam import FusedAdamLike
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import (
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
    layer_wise_optimizer,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer
from megatron.core.transformer import TransformerConfig
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from ranks import all_gather
from torch.optim import SGD, AdamW

from miles_reset.testing import Trial

UPSTREAM_WARNINGS = (
    # While an optimizer is built.
    "ignore:MimoModelConfig is experimental:UserWarning",
    "ignore:full scope is deprecated:UserWarning",
    "ignore:optimizer='dist_muon' is deprecated:DeprecationWarning",
    "ignore:WARNING:UserWarning:megatron.core.optimizer.optimizer",  # No optimizer on a rank.
    # While it steps.
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:`torch.distributed.reduce_scatter_tensor` is deprecated:FutureWarning",
    "ignore:`torch.distributed.all_gather_into_tensor` is deprecated:FutureWarning",
)
"""What Megatron warns of, once it is imported, as pytest ``filterwarnings`` entries."""

Stage = Literal["build", "step", "round_trip"]


@contextlib.contextmanager
def megatron_session() -> Iterator[None]:
    """Run the body as one rank of a data-parallel Megatron job, and undo all of it.

    In a function that `run_ranks` runs the job has as many ranks as that; otherwise it has one.
    """
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as undo:
        undo.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            undo.callback(torch.distributed.destroy_process_group)
        undo.enter_context(mock.patch.object(torch.distributed, "all_gather", all_gather))
        undo.enter_context(fake_cuda())
        undo.callback(parallel_state.destroy_model_parallel)
        parallel_state.initialize_model_parallel(1, 1)
        yield


@contextlib.contextmanager
def te_like(adam: type = FusedAdamLike) -> Iterator[None]:
    """Make Megatron believe in a Transformer Engine whose FusedAdam is this class.

    Building an optimizer, ``state_dict`` and ``load_state_dict`` all look at this, so enter it
    around direct calls of them where the fixture has ``te_like`` set.
    """
    there = {"Adam": adam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    chosen = {"Adam": adam, "USING_PYTORCH_OPTIMIZER": False}
    with (
        mock.patch.multiple(megatron.core.optimizer, **chosen),
        mock.patch.multiple(distrib_optimizer, **there),
        mock.patch("megatron.core.utils.get_te_version", return_value=Version("2.8.0")),
    ):
        yield


class Net(torch.nn.Module):
    """An embedding, two matrices and two vectors: muon takes the matrices and leaves the rest."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"embedding": (16, 8), "w1": (8, 8), "b1": (8,), "w2": (12, 8), "norm": (8,)}
        for name, shape in shapes.items():
            weight = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(weight))
        self.embedding.is_embedding_or_output_parameter = True


@dataclass
class Fixture:
    """An optimizer that is ready to step; its methods are what a trial of the laws needs."""

    optimizer: Any
    net: Net
    ddp: DistributedDataParallel | None = None
    te_like: bool = False

    def step(self, i: int) -> None:
        """Take one optimizer step, with gradients that depend on i and on the rank alone."""
        self.set_gradients(i)
        self.optimizer.step()

    def set_gradients(self, i: int) -> None:
        """Do what comes before the optimizer's step."""
        if self.ddp is not None:
            self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * (i + 1) + torch.distributed.get_rank())
        for param in self.net.parameters():
            scale = float(self.optimizer.get_loss_scale()) if param.dtype == torch.half else 1.0
            grad = scale * torch.randn(param.shape, generator=generator)
            if self.ddp is not None:
                param.main_grad.copy_(grad)
            else:
                param.grad = grad.to(param.dtype)
        if self.ddp is not None:
            self.ddp.finish_grad_sync()

    def weights(self) -> list[torch.Tensor]:
        """Find every tensor that holds weights: of the model, fp32 masters, inner parameters."""
        params = list(self.net.parameters())
        for holder in group_holders(self.optimizer):
            held = [param for group in holder.param_groups for param in group["params"]]
            params += held
            if getattr(holder, "master_weights", False):
                params += [holder.state[param]["master_param"] for param in held]
        return list({id(param): param for param in params}.values())

    def round_trip(self) -> None:
        """Save the optimizer's state, and load a copy of it into the same optimizer."""
        layer_wise = isinstance(self.optimizer, LayerWiseDistributedOptimizer)
        with te_like() if self.te_like else contextlib.nullcontext():
            state = copy.deepcopy(self.optimizer.state_dict())
            if layer_wise and isinstance(state, list):
                state = dict(enumerate(state))  # It saves a list, and loads a dict.
            self.optimizer.load_state_dict(state)


def group_holders(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield each torch optimizer below, the HybridDeviceOptimizers among them, outermost first."""
    if isinstance(optimizer, ChainedOptimizer):
        for child in optimizer.chained_optimizers:
            yield from group_holders(child)
    elif isinstance(optimizer, MegatronOptimizer):
        yield from group_holders(optimizer.optimizer)
    elif optimizer is not None:
        yield optimizer
        yield from getattr(optimizer, "sub_optimizers", ())


@dataclass(frozen=True)
class Upstream:
    """A failure of Megatron itself, in the versions that a specifier such as ``<0.17`` names."""

    stage: Stage
    error: type[Exception]
    match: str
    versions: str = ""


@dataclass(frozen=True)
class Recipe:
    """How to build a fixture, what it needs, and where Megatron fails.

    Attributes:
        make: Builds the fixture.
        te_like: Megatron has to see a stand-in where it looks for FusedAdam.
        emerging: It needs emerging-optimizers, as Megatron has joined them since 0.19.
        failures: What Megatron cannot do.
    """

    make: Callable[[], Fixture]
    te_like: bool = False
    emerging: bool = False
    failures: tuple[Upstream, ...] = ()

    def unavailable(self) -> str | None:
        """Say why the installed packages do not have this optimizer, or return None."""
        if self.emerging and not _installed_is(">=0.19"):
            return f"needs megatron-core >=0.19, not {megatron.core.__version__}"
        if self.emerging and importlib.util.find_spec("emerging_optimizers") is None:
            return "needs emerging-optimizers"
        return None

    def failure(self, stage: Stage) -> Upstream | None:
        """Return the failure that the installed Megatron has at a stage, or None."""
        here = (f for f in self.failures if f.stage == stage and _installed_is(f.versions))
        return next(here, None)


def _installed_is(versions: str) -> bool:
    return SpecifierSet(versions).contains(megatron.core.__version__, prereleases=True)


def build(name: str, adam: type = FusedAdamLike) -> Fixture:
    """Build a fixture by its name in `FIXTURES`, with this FusedAdam; call it within a session."""
    recipe = FIXTURES[name]
    with te_like(adam) if recipe.te_like else contextlib.nullcontext():
        fixture = recipe.make()
    fixture.te_like = recipe.te_like
    return fixture


def trial(name: str, adam: type = FusedAdamLike) -> Trial:
    """Build a fixture as a trial of the laws."""
    fixture = build(name, adam)
    return Trial(fixture.optimizer, fixture.step, fixture.weights, fixture.round_trip)


def cases(*stages: Stage) -> list[Any]:
    """List the names in `FIXTURES` for ``pytest.mark.parametrize``.

    What the installed packages do not have is skipped by name, with the reason. What fails in
    Megatron at one of the stages is left out.
    """
    params = []
    for name, recipe in FIXTURES.items():
        reason = recipe.unavailable()
        marks = [pytest.mark.skip(reason=f"{name} {reason}")] if reason else []
        if not any(recipe.failure(stage) for stage in stages):
            params.append(pytest.param(name, marks=marks))
    return params


def _config(**options: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": 1e-2, "clip_grad": 0.0} | options)


def _wrap(net: Net, *, distributed: bool = False, layer_wise: bool = False) -> Any:
    """Give the model Megatron's gradient buffers, laid out as the optimizer wants them."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    layout = {}
    if layer_wise:
        layer_wise_optimizer.tag_params_for_buffer_routing([net])
        layout["full_param_layout"] = LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(net.parameters()), None, torch.distributed.get_world_size(), ddp_config
        )
    return DistributedDataParallel(config, ddp_config, net, **layout)


def _megatron(
    dtype: torch.dtype = torch.bfloat16, *, experts: bool = False, layout: bool = False, **options: Any
) -> Fixture:
    """What Megatron makes of a model and of some options of its configuration."""
    net = Net(dtype)
    if experts:
        net.w2.allreduce = False  # This is how Megatron marks the weight of an expert.
    config = _config(bf16=dtype == torch.bfloat16, fp16=dtype == torch.half, **options)
    distributed = config.use_distributed_optimizer or layout
    ddp = _wrap(net, distributed=distributed, layer_wise=layout)
    return Fixture(get_megatron_optimizer(config, [ddp]), net, ddp)


def _distributed_aware() -> Fixture:
    """What keeps the master weights in the state of FusedAdam; they are made here, not by a step."""
    net = Net(torch.bfloat16)
    options = {"use_distributed_optimizer": True, "use_precision_aware_optimizer": True}
    config = _config(bf16=True, optimizer_cpu_offload=True, store_param_remainders=False, **options)
    config.optimizer_cpu_offload = False  # So said, it did not look for Transformer Engine.
    ddp = _wrap(net, distributed=True)
    fixture = Fixture(get_megatron_optimizer(config, [ddp]), net, ddp)
    for holder in group_holders(fixture.optimizer):
        for param in chain.from_iterable(group["params"] for group in holder.param_groups):
            holder.initialize_state(param)
    return fixture


def _group(*params: torch.nn.Parameter) -> list[dict[str, Any]]:
    """One param group with the keys by which Megatron finds a saved group again."""
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return [{"params": list(params), "lr": 1e-2} | keys]


def _fp32(optimizer: torch.optim.Optimizer | None) -> FP32Optimizer:
    return FP32Optimizer(optimizer, _config(), lambda _: None)


def _chain_nested() -> Fixture:
    net = Net(torch.float32)
    ddp = _wrap(net)
    adam = _fp32(AdamW(_group(net.embedding)))
    sgd = _fp32(SGD(_group(net.w1), momentum=0.9))
    last = _fp32(AdamW(_group(net.b1, net.w2, net.norm)))
    return Fixture(ChainedOptimizer([ChainedOptimizer([adam, sgd]), last]), net, ddp)


def _chain_with_stub(dtype: torch.dtype, **options: Any) -> Fixture:
    """What a rank has that trains one model and holds another one frozen."""
    fixture = _megatron(dtype, **options)
    (real,) = fixture.optimizer.chained_optimizers
    stub = _fp32(None)
    if isinstance(real, DistributedOptimizer):
        stub = DistributedOptimizer(None, real.config, None, None, [fixture.ddp], None, None, None, 0, 0)
    stub.config = real.config
    fixture.optimizer = ChainedOptimizer([real, stub])
    return fixture


def _chain_without_weights(*optimizers: FP32Optimizer) -> Fixture:
    net = Net(torch.float32).requires_grad_(False)
    return Fixture(ChainedOptimizer(list(optimizers)), net)


def _adaptive_muon(moment2_method: str) -> Fixture:
    """Adaptive muon with two attributes that Megatron 0.19 forgets.

    AdaptiveMuon of emerging-optimizers 0.3 scales its updates by what its constructor noted, and
    Megatron's subclass does not call that constructor. They are set on the instance, so that
    ``adaptive_muon_as_shipped`` still meets the class as it is.
    """
    fixture = LAYER_WISE(optimizer="adaptive_muon", adaptive_muon_moment2_method=moment2_method)
    for holder in group_holders(fixture.optimizer):
        if hasattr(holder, "moment2_method"):
            holder.scale_mode, holder.extra_scale_factor = "spectral", 1.0
    return fixture


def _hybrid(
    dtype: torch.dtype = torch.bfloat16,
    *,
    gpu: type[torch.optim.Optimizer] = AdamW,
    fraction: float = 0.5,
    overlap: bool = True,
    update_in_fp32: bool = True,
) -> Fixture:
    """A HybridDeviceOptimizer alone, which reads ``param.grad`` as torch's optimizers do."""
    net = Net(dtype)
    optimizer = HybridDeviceOptimizer(
        list(net.parameters()),
        offload_fraction=fraction,
        cpu_optimizer_cls=AdamW,
        gpu_optimizer_cls=gpu,
        param_update_in_fp32=update_in_fp32,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        lr=1e-2,
        fused=True,
    )
    return Fixture(optimizer, net)


FP32_SGD = partial(_megatron, torch.float32, optimizer="sgd", sgd_momentum=0.9)
DISTRIBUTED = partial(_megatron, use_distributed_optimizer=True)
OFFLOADED = partial(
    DISTRIBUTED,
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
    overlap_cpu_optimizer_d2h_h2d=True,
)
AWARE = partial(OFFLOADED, use_precision_aware_optimizer=True)
LAYER_WISE = partial(_megatron, optimizer="muon", use_layer_wise_distributed_optimizer=True)

NO_STUB_STATE = Upstream("round_trip", AttributeError, "'NoneType' .* 'state_dict'")
NO_FP32_MASTER = Upstream("round_trip", KeyError, r"tensor\(")
NOT_ONE_CHILD = (AssertionError, "more than one optimizer when accessing self.optimizer")

FIXTURES = {
    "fp32_adam": Recipe(partial(_megatron, torch.float32)),
    "fp32_sgd": Recipe(FP32_SGD),
    "bf16": Recipe(_megatron),
    "fp16_scaler": Recipe(partial(_megatron, torch.half, initial_loss_scale=16.0, loss_scale_window=2)),
    "chain_nested": Recipe(
        _chain_nested,
        failures=(Upstream("step", *NOT_ONE_CHILD, "<0.17"), Upstream("round_trip", *NOT_ONE_CHILD)),
    ),
    "chain_fp32_stub": Recipe(partial(_chain_with_stub, torch.float32), failures=(NO_STUB_STATE,)),
    "chain_distributed_stub": Recipe(
        partial(_chain_with_stub, torch.bfloat16, use_distributed_optimizer=True),
        failures=(NO_STUB_STATE,),
    ),
    "chain_stub_only": Recipe(lambda: _chain_without_weights(_fp32(None)), failures=(NO_STUB_STATE,)),
    "chain_empty": Recipe(
        _chain_without_weights, failures=(Upstream("step", IndexError, "list index out of range"),)
    ),
    "distributed_bf16": Recipe(DISTRIBUTED),
    "distributed_fp32": Recipe(partial(DISTRIBUTED, torch.float32)),
    "distributed_experts": Recipe(partial(DISTRIBUTED, experts=True)),
    "distributed_fused": Recipe(DISTRIBUTED, te_like=True),
    "distributed_aware_fused": Recipe(_distributed_aware, te_like=True),
    "distributed_lion": Recipe(partial(DISTRIBUTED, optimizer="lion"), emerging=True),
    "muon": Recipe(partial(_megatron, optimizer="muon"), emerging=True),
    "muon_layer_wise": Recipe(LAYER_WISE, emerging=True),
    "muon_layer_wise_layout": Recipe(partial(LAYER_WISE, layout=True), emerging=True),
    "muon_layer_wise_fp32": Recipe(  # Its children are torch optimizers, without a wrapper.
        partial(LAYER_WISE, torch.float32),
        emerging=True,
        failures=(
            Upstream("step", AttributeError, "'prepare_grads'"),
            Upstream("round_trip", AttributeError, "'optimizer'"),
        ),
    ),
    "dist_muon": Recipe(partial(_megatron, optimizer="dist_muon"), emerging=True),
    "adaptive_muon_as_shipped": Recipe(
        partial(LAYER_WISE, optimizer="adaptive_muon"),
        emerging=True,
        failures=(Upstream("step", AttributeError, "'scale_mode'"),),
    ),
    "adaptive_muon_adamuon": Recipe(partial(_adaptive_muon, "adamuon"), emerging=True),
    "adaptive_muon_normuon": Recipe(partial(_adaptive_muon, "normuon"), emerging=True),
    "soap": Recipe(partial(_megatron, torch.float32, optimizer="soap"), emerging=True),
    "hybrid_overlap": Recipe(_hybrid),
    "hybrid_no_overlap": Recipe(partial(_hybrid, overlap=False)),
    "hybrid_all_offloaded": Recipe(partial(_hybrid, fraction=1.0)),
    "hybrid_none_offloaded": Recipe(partial(_hybrid, fraction=0.0)),
    "hybrid_fp32_params": Recipe(partial(_hybrid, torch.float32), failures=(NO_FP32_MASTER,)),
    "hybrid_fp32_update_off": Recipe(partial(_hybrid, torch.float32, update_in_fp32=False)),
    "hybrid_bf16_update": Recipe(partial(_hybrid, update_in_fp32=False)),
    "hybrid_fused": Recipe(partial(_hybrid, gpu=FusedAdamLike)),
    "hybrid_sgd": Recipe(
        partial(FP32_SGD, optimizer_cpu_offload=True, optimizer_offload_fraction=0.5),
        failures=(NO_FP32_MASTER,),
    ),
    "distributed_hybrid": Recipe(OFFLOADED, failures=(NO_FP32_MASTER,)),
    "distributed_hybrid_fused": Recipe(OFFLOADED, te_like=True, failures=(NO_FP32_MASTER,)),
    "distributed_hybrid_aware": Recipe(
        AWARE, failures=(Upstream("build", TypeError, "'NoneType' and 'Version'", "<0.17"),)
    ),
    "distributed_hybrid_aware_fused": Recipe(AWARE, te_like=True),
}
