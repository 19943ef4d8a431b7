"""A GPU on paper: torch.compile generates a card's code on a machine that has none.

    with paper.gpu("sm_90"):
        torch.compile(fn)(*paper.like(args))

Tensors are PyTorch's fake ones: a shape, strides and a dtype on device "cuda", and no memory. Inductor asks its device
interface what the card is, and is told here. What it writes is the text it would write there; nothing can be run.
Two things are decided by what is not on paper: a product's operands are never padded, since whether that pays is timed,
and `scaled_dot_product_attention` is written out as its formula, since PyTorch asks the card's libraries for a kernel.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from . import machine

_SMS = {
    "sm_75": ("Tesla T4", 40, 1024),
    "sm_80": ("NVIDIA A100-SXM4-80GB", 108, 2048),
    "sm_90": ("NVIDIA H200", 132, 2048),
    "sm_100": ("NVIDIA B200", 148, 2048),
}
"""Of one card of each architecture: its name, SMs, and threads that an SM holds (NVIDIA's whitepapers)."""

ARCHS = tuple(_SMS)
_constants = []
_lock = threading.RLock()


@cache
def _mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    _guard()
    return FakeTensorMode()


def like(tree, device: str = "cuda"):
    """`tree` (tensors in tuples, lists and dicts) with each tensor on paper, as if on `device`: the paper GPU, or
    "cpu". Shape, strides, offset and `requires_grad` are kept.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    def one(t):
        if isinstance(t, torch._subclasses.FakeTensor) and t.device.type == device:
            return t
        with _mode():
            memory = torch.empty(_extent(t), dtype=t.dtype, device=device)
            copied = memory.as_strided(t.shape, t.stride(), t.storage_offset())
            return copied.detach().requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, one, tree)


def _extent(t) -> int:
    """Elements of the memory in which `t` lies, up to its last one."""
    last = sum((side - 1) * stride for side, stride in zip(t.shape, t.stride(), strict=True))
    return t.storage_offset() + last + 1 if t.numel() else t.storage_offset()


@cache
def _guard() -> None:
    """Give PyTorch a guard of CUDA devices that does nothing, where there is no GPU or this process is not shown any.
    Its bindings enter one before they look at a tensor on "cuda", a fake one too.
    """
    import torch

    try:
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 2).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")  # CPU, CUDA
        register = c10._ZN3c104impl24DeviceGuardImplRegistrarC1ENS_10DeviceTypeEPKNS0_24DeviceGuardImplInterfaceE
    except (OSError, ValueError, AttributeError) as missing:
        sentence = f"This torch ({torch.__version__}) has no place for a GPU on paper: {missing}."
        raise machine.NotReady(sentence, "make clean lab, which installs the version it was tried with") from missing
    if not guards[1]:  # a build for CPUs: a build for GPUs has one
        register(ctypes.byref(ctypes.c_char()), ctypes.c_int8(1), ctypes.c_void_p(guards[0]))
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # replaces the CPU's, or one that finds no GPU, by one that says CUDA
        # where Inductor computes with constants it makes them on the graph's device: on paper, on the CPU
        _constants.append(library := torch.library.Library("aten", "IMPL"))
        library.impl("full", lambda size, value, *, dtype=None, **rest: torch.full(size, value, dtype=dtype), "CUDA")
        library.impl(
            "scalar_tensor", lambda value, *, dtype=None, **rest: torch.scalar_tensor(value, dtype=dtype), "CUDA"
        )


@contextmanager
def gpu(arch: str = "sm_90") -> Iterator[None]:
    """While it is entered, torch.compile believes in a card of `arch`, one of `ARCHS`. Raises ValueError for others."""
    import torch
    import triton
    from torch._dynamo import device_interface
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime import hints
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget

    if arch not in _SMS:
        raise ValueError(f"no card of {arch} is known on paper; known are {', '.join(_SMS)}")
    name, sms, threads = _SMS[arch]
    capability = int(arch[3:-1]), int(arch[-1])
    card = SimpleNamespace(
        name=name, major=capability[0], minor=capability[1], multi_processor_count=sms, warp_size=32,
        max_threads_per_multi_processor=threads, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    )  # fmt: skip

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        get_current_device=lambda: 0,
        utils=SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": machine.shared_limit(arch)}),
    )

    class Interface(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            get_device_properties = staticmethod(lambda device=None: card)
            current_device = staticmethod(lambda: 0)

        is_available = staticmethod(lambda: True)
        is_bf16_supported = staticmethod(lambda including_emulation=False: capability >= (8, 0))
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        get_device_properties = staticmethod(lambda device=None: card)
        get_compute_capability = staticmethod(lambda device=None: 10 * capability[0] + capability[1])
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    _guard()
    device_interface.get_interface_for_device("cpu")  # fills the table below, once
    learn = joint_graph.lazy_init
    with _lock, ExitStack() as stack:
        stack.enter_context(mock.patch.dict(device_interface.device_interfaces, cuda=Interface))
        # the patterns it looks for are traced on tensors of the device that is compiled for, real ones
        stack.enter_context(mock.patch.object(joint_graph, "lazy_init", lambda device=None: learn(torch.device("cpu"))))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", driver))
        for function, answer in (("get_device_capability", capability), ("get_device_properties", card)):
            stack.enter_context(mock.patch.object(torch.cuda, function, lambda device=None, answer=answer: answer))
        # what is kept on disk is for cards that are here; padding is decided by timing it; kernels are not compiled
        settings = {"fx_graph_cache": False, "shape_padding": False, "compile_threads": 1}
        stack.enter_context(torch._inductor.config.patch(settings))
        looked_up = hints.DeviceProperties.create, has_triton
        for answer in looked_up:
            answer.cache_clear()
        try:
            yield
        finally:
            for answer in looked_up:
                answer.cache_clear()
