"""The choice of the code that computes attention, and of the device that it runs on; and the mark
of a setting that was left out.
"""

import enum
from typing import Any


class NotGiven(enum.Enum):
    """The type of `NOT_GIVEN`."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN: Any = NotGiven.NOT_GIVEN
"""The default of a setting for which None is a value: it was left out."""


class Platform(enum.StrEnum):
    """Which code runs: the best that is measured (`AUTO`), plain XLA, or a Pallas kernel.

    `INTERPRET` interprets the Pallas kernel of the backend, by default the kernel of TPUs, on any
    device. That is slow, and shows what a kernel computes. `CUDNN` runs NVIDIA's library, which
    computes fewer calls, and some of them differently; `AUTO` never chooses it.
    """

    AUTO = "auto"
    XLA = "xla"
    PALLAS = "pallas"
    INTERPRET = "interpret"
    CUDNN = "cudnn"


class Backend(enum.StrEnum):
    """The device that the code is for. It decides which `forward_*` of a strategy runs.

    `TRITON` is `CUDA` with other kernels: one source for all of NVIDIA's chips since Ampere.
    """

    ANY = "any"
    TPU = "tpu"
    GPU = "gpu"
    CUDA = "cuda"
    TRITON = "triton"
    ROCM = "rocm"
    CPU = "cpu"


_DEVICE_PLATFORMS = {
    "tpu": Backend.TPU,
    "gpu": Backend.GPU,
    "triton": Backend.TRITON,
    "cudnn": Backend.CUDA,
}
GPUS = (Backend.GPU, Backend.CUDA, Backend.TRITON, Backend.ROCM)
"""The backends that are GPUs."""

OTHER_KERNELS = {Backend.TRITON: Backend.CUDA}
"""The backends that stand for other kernels of a device, and the backend of that device."""


def device_of_platform(platform: Any) -> Backend | None:
    """The backend that a platform names: `"tpu"`, `"gpu"` and `"triton"` mean Pallas on that
    device, and `"cudnn"` runs on NVIDIA GPUs. It is None for any other platform.
    """
    if platform is None or platform is NOT_GIVEN:
        return None
    return _DEVICE_PLATFORMS.get(text_of(platform, "platform"))


def text_of(value: Any, what: str) -> str:
    """The lower-case text of a string or of a string-valued enum member."""
    value = value.value if isinstance(value, enum.Enum) else value
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a string or an enum member, got {value!r}.")
    return value.lower()


def resolve_target(platform: Any, backend: Any) -> tuple[Platform, Backend]:
    """The platform and the backend that enum members or strings in any case name.

    None means the default, `AUTO` and `ANY`.

    **Raises:** `ValueError` for an unknown name, and if the two name different devices.
    """
    name = "any" if backend is None else text_of(backend, "backend")
    if name not in list(Backend):
        raise ValueError(f"backend {backend!r} is not one of {[b.value for b in Backend]}.")
    backend = Backend(name)
    device = device_of_platform(platform)
    if device is None:
        name = "auto" if platform is None else text_of(platform, "platform")
        name = "xla" if name == "jax" else name
        if name not in list(Platform):
            known = [p.value for p in Platform]
            raise ValueError(
                f"platform {platform!r} is not one of {known}, 'jax' (XLA), 'tpu', 'gpu' or "
                "'triton' (Pallas on that backend)"
                + (f"; backend={name!r} names the device." if name in list(Backend) else ".")
            )
        return Platform(name), backend
    if text_of(platform, "platform") == Platform.CUDNN:
        if backend in (Backend.ANY, Backend.GPU, Backend.CUDA):
            return Platform.CUDNN, device
        raise ValueError(
            "platform='cudnn' runs NVIDIA's library on backend='cuda', but "
            f"backend={backend.value!r} was given; leave one of them out."
        )
    if backend is Backend.ANY:
        return Platform.PALLAS, device
    if backend is device or (device is Backend.GPU and backend in GPUS):
        return Platform.PALLAS, backend
    if device is Backend.TRITON and backend in (Backend.GPU, Backend.CUDA):
        return Platform.PALLAS, device
    raise ValueError(
        f"platform={device.value!r} means platform='pallas' on backend={device.value!r}, but "
        f"backend={backend.value!r} was given; leave one of them out."
    )


class RuntimeMode(enum.StrEnum):
    """The work that a call of attention is part of. A member equals its string: `"__train__"`."""

    AUTOREGRESSIVE = "__autoregressive__"
    PREFILL = "__prefill__"
    TRAIN = "__train__"
    INSERT = "__insert__"

    @classmethod
    def _missing_(cls, value: object) -> "RuntimeMode":
        name = text_of(value, "mode").strip("_")
        for member in cls:
            if member.value.strip("_") == name:
                return member
        raise ValueError(f"mode {value!r} is not one of {[m.value for m in cls]}.")

    @property
    def generates(self) -> bool:
        """Whether the queries are the few rows of a generation step, as when decoding."""
        return self in (RuntimeMode.AUTOREGRESSIVE, RuntimeMode.INSERT)
