"""Names of torch that are private or younger than the oldest torch we support: used nowhere else.

Each is looked up once, here. A torch without one has what stands in for it, and `LOST` says what
the recording lacks then; that is told in the file's coverage, once, and nothing else happens.
"""

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable
from pkgutil import resolve_name
from types import CodeType
from typing import Any

import torch
from torch import Tensor

LOST: dict[str, str] = {}
"""Names that this torch has not -> what is not recorded, or not rightly, without them."""


def _name(name: str, lost: str, instead: Any = None) -> Any:
    """What ``name``, "package.module:attribute", stands for; else ``instead``."""
    try:
        return resolve_name(name)
    except (ImportError, AttributeError):
        if lost:
            LOST[name.replace(":", ".")] = lost
        return instead


def _code(name: str, lost: str) -> CodeType | None:
    """The code by which a Python function is known on the stack; None where it is not Python's."""
    found = getattr(_name(name, lost), "__code__", None)
    if found is None:
        LOST[name.replace(":", ".")] = lost
    return found


# Passes

_BACKWARDS = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}


def backwards_on_the_stack() -> int:
    """How many backwards of this thread have begun and not ended, as Python's stack tells.

    Threads in which an accelerator's backward calls hooks have a stack of their own.
    """
    frame, found = sys._getframe(1), 0
    while frame is not None:
        found += frame.f_code in _BACKWARDS
        frame = frame.f_back  # type: ignore[assignment]
    return found


_graph_task: Callable[[], int] = _name(
    "torch._C:_current_graph_task_id",
    "on an accelerator, forwards that checkpointing repeats in the backward count as others do",
    instead=lambda: backwards_on_the_stack() - 1,
)


def inside_backward() -> bool:
    """Whether a backward is running that calls us."""
    return _graph_task() != -1


_engine: Any = _name(
    "torch.autograd:Variable._execution_engine",
    "steps inside of a backward each end the training step; passes whose gradients were cleared count",
)


def at_end_of_backward(then: Callable[[], None]) -> bool:
    """Have ``then`` called at the end of the backward that is running; whether it will be."""
    queue = getattr(_engine, "queue_callback", None)
    if queue is not None:
        with contextlib.suppress(RuntimeError):  # outside of a backward
            queue(then)
            return True
    return False


is_tracing: Callable[[], bool] = _name(
    "torch.jit:is_tracing",
    "what is observed while torch.jit.trace runs is traced too",
    instead=bool,
)
_transforms: Callable[[], Any] = _name(
    "torch._C._functorch:peek_interpreter_stack",
    "forwards inside of transforms (vmap, grad, jvp) count as passes",
    instead=bool,
)


def in_transform() -> bool:
    """Whether a transform of functions (vmap, jvp, grad) is under way."""
    return bool(_transforms())


# Compiled code

is_exporting: Callable[[], bool] = _name(
    "torch.compiler:is_exporting",
    "a program exported while a step is recorded keeps calls of dynscope::observe",
    instead=bool,
)
_keep: Callable[[Any], Any] = _name(
    "torch.fx.node:has_side_effect", "compilers may drop what is observed in compiled code"
)


def keep_in_graphs(operator: Any) -> None:
    """Compilers must not drop calls of ``operator``, which has no output."""
    if _keep is not None:
        _keep(operator)


def has_compiled() -> bool:
    """Whether torch.compile has compiled something in this process; also where that is not known."""
    if "torch._dynamo" not in sys.modules:
        return False
    counters = _name("torch._dynamo.utils:counters", "")
    return counters is None or bool(counters["stats"].get("unique_graphs", 0))


# Tensors

plainly: Callable[[], Any] = _name(
    "torch._C:DisableTorchFunctionSubclass",
    "outputs of a subclass of Tensor are measured with the subclass's own functions",
    instead=contextlib.nullcontext,
)
_is_wrapped: Callable[[Tensor], bool] = _name(
    "torch._C._functorch:is_functorch_wrapped_tensor",
    "outputs inside of transforms (vmap, grad, jvp) may be measured",
    instead=lambda x: False,
)
_Fake: type = _name(
    "torch._subclasses:FakeTensor",
    "outputs that stand for others while shapes are worked out may be measured",
    instead=type("_Nothing", (), {}),
)


def is_symbolic(x: Tensor) -> bool:
    """Whether it stands for others, in a transform or while shapes are worked out: no training."""
    return _is_wrapped(x) or isinstance(x, _Fake)


_foreach_norm: Any = _name("torch:_foreach_norm", "")  # slower without, nothing is lost
_foreach_sub: Any = _name("torch:_foreach_sub", "")


def norms(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The Euclidean norm of each, in few calls."""
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(x, dtype=dtype) for x in tensors]
    return list(_foreach_norm(tensors, dtype=dtype))


def differences(these: list[Tensor], those: list[Tensor]) -> list[Tensor]:
    """These minus those, one by one, in few calls."""
    if _foreach_sub is None:
        return [x - y for x, y in zip(these, those, strict=True)]
    return list(_foreach_sub(these, those))


# Modules

ScriptModule: type = _name(
    "torch.jit:ScriptModule",
    "",
    instead=type("_Nothing", (), {}),  # then there are none
)

# Steps


def step_hooks(optimizer: torch.optim.Optimizer) -> "OrderedDict[int, Any] | None":
    """What is called before a step, in order, by number; None where that is not known."""
    found: OrderedDict[int, Any] | None = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if found is None:
        LOST["torch.optim.Optimizer._optimizer_step_pre_hooks"] = (
            "gradient/norm is of before step hooks that are registered after attaching"
        )
    return found


OPTIMIZER_STEP = _code(
    "torch.optim:Optimizer.profile_hook_step",
    "a step that an optimizer takes inside of another's counts as one of its own",
)
"""On the stack while an optimizer steps; its first argument is the optimizer."""
if OPTIMIZER_STEP is not None:
    OPTIMIZER_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__

_SCALER = "a gradient scaler that was not given to attach() is not seen: its skipped steps count"
SCALER_STEPS = tuple(
    _code(f"torch.amp:GradScaler.{name}", _SCALER) for name in ("step", "_maybe_opt_step")
)
"""On the stack while a gradient scaler has an optimizer step."""
UNSCALED: Any = _name(
    "torch.amp.grad_scaler:OptState.UNSCALED",
    "gradients that a gradient scaler has unscaled before they are clipped are unscaled once more",
)

CLIPPING = "_group_tensors_by_device_and_dtype"
"""The name in `torch.nn.utils.clip_grad` of what all clipping calls before it writes."""
sort_gradients: Any = _name(
    f"torch.nn.utils.clip_grad:{CLIPPING}",
    "gradients before clipping, unless scope.before_clip() is called",
)
