"""Loading and launching machine code, and the tensor maps by which the copy engine finds tiles in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from halfbyte.errors import HalfbyteError
from halfbyte.kernels.hopper.compiler import Source, machine_code


@dataclass(frozen=True)
class Launch:
    """grid, block: CUDA's. shared: dynamic shared memory in bytes. cluster: blocks along the grid's first axis.

    overlap: may start before the kernel before it has ended (it waits for that one itself where it has to).
    """

    grid: tuple[int, int, int]
    block: int
    shared: int
    cluster: int = 1
    overlap: bool = True


class Function:
    """One compiled kernel on one device."""

    def __init__(self, source: Source, device: int) -> None:
        driver = _driver()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes torch's context the current one
            library = _checked(
                driver.cuLibraryLoadData(machine_code(source), [], [], 0, [], [], 0), "load a kernel"
            )
            kernel = _checked(driver.cuLibraryGetKernel(library, source.kernel.encode()), "find a kernel")
            self._handle = _checked(driver.cuKernelGetFunction(kernel), "find a kernel")
        self._library = library  # unloaded with the last reference
        self._device = device
        self._shared = 0
        self._configurations: dict[tuple[Launch, int], Any] = {}

    def __call__(self, launch: Launch, arguments: Sequence[Any]) -> None:
        """Run on the current stream of the current device, which has to be this one.

        arguments: ctypes values and tensor maps, in the kernel's order.
        """
        stream = current_stream(self._device)
        configuration = self._configurations.get((launch, stream))
        if configuration is None:
            configuration = self._configurations[launch, stream] = self._configuration(launch, stream)
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        # The bindings' own call takes longer than all else here.
        error = _launcher()(configuration.getPtr(), int(self._handle), pointers, None)
        if error:
            _checked((_driver().CUresult(error),), "launch a kernel")

    def _configuration(self, launch: Launch, stream: int) -> Any:
        driver = _driver()
        if launch.shared > self._shared:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(driver.cuFuncSetAttribute(self._handle, attribute, launch.shared), "set shared memory")
            self._shared = launch.shared
        configuration = driver.CUlaunchConfig()
        configuration.gridDimX, configuration.gridDimY, configuration.gridDimZ = launch.grid
        configuration.blockDimX, configuration.blockDimY, configuration.blockDimZ = launch.block, 1, 1
        configuration.sharedMemBytes = launch.shared
        configuration.hStream = stream
        attributes = []
        if launch.cluster > 1:
            cluster = driver.CUlaunchAttribute()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dimensions = cluster.value.clusterDim
            dimensions.x, dimensions.y, dimensions.z = launch.cluster, 1, 1
            attributes.append(cluster)
            # The default may put a cluster's blocks on one multiprocessor and leave others idle.
            policy = driver.CUlaunchAttribute()
            policy.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE
            policy.value.clusterSchedulingPolicyPreference = (
                driver.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING
            )
            attributes.append(policy)
        if launch.overlap:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            attributes.append(overlap)
        configuration.attrs, configuration.numAttrs = attributes, len(attributes)
        return configuration


@cache
def function(source: Source, device: int) -> Function:
    """The compiled kernel, loaded once a device."""
    return Function(source, device)


@lru_cache(maxsize=4096)
def tensor_map(
    address: int,
    element: str,
    rows: int,
    columns: int,
    pitch: int,
    box_rows: int,
    box_columns: int,
    swizzle: int,
) -> ctypes.Array:
    """128 bytes that describe ``[rows, columns]`` at ``address`` and the box that one copy takes from it.

    element: ``u8``, ``bf16`` (any 2 bytes) or ``f32``. pitch: bytes from row to row, a multiple of 16. What lies
    outside reads as zero. swizzle: of 128 or 32 bytes. (CUDA driver API, cuTensorMapEncodeTiled.)
    """
    driver = _driver()
    u32, u64, kinds = driver.cuuint32_t, driver.cuuint64_t, driver.CUtensorMapDataType
    kind = {
        "u8": kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "f32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }[element]
    swizzles = driver.CUtensorMapSwizzle
    swizzled = {128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B, 32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B}[swizzle]
    made = _checked(
        driver.cuTensorMapEncodeTiled(
            kind,
            2,
            address,
            [u64(columns), u64(rows)],
            [u64(pitch)],
            [u32(box_columns), u32(box_rows)],
            [u32(1), u32(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzled,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "describe a tensor to the copy engine",
    )
    return (ctypes.c_ubyte * 128).from_buffer_copy(ctypes.string_at(made.getPtr(), 128))


def current_stream(device: int) -> int:
    """Torch's current stream of a device as CUDA's handle; in a tenth of the time that the public way to it takes."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def captured_by(stream: int) -> int | None:
    """The number of the graph that ``stream`` is capturing, if it is."""
    driver = _driver()
    result, status, graph, *_ = driver.cuStreamGetCaptureInfo(stream)
    _checked((result,), "ask whether a graph is being captured")
    return int(graph) if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE else None


def pointer(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's data is, as a kernel's argument; null for none."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


@cache
def _launcher() -> Callable[[int, int, ctypes.Array, None], int]:
    """``cuLaunchKernelEx(configuration, function, arguments, nothing)``."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    launch.restype = ctypes.c_int
    return launch


def _driver():  # type: ignore[no-untyped-def]  # the module of a library that ships no types
    from cuda.bindings import driver

    return driver


def _checked(result: tuple, what: str) -> Any:
    if int(result[0]):
        raise HalfbyteError(f"CUDA could not {what}: {result[0].name}")
    return result[1] if len(result) > 1 else None
