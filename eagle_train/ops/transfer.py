"""Between host and device, without either waiting for the other. Paper section 3.3. Knows no models.

A copy that is not from or to pinned memory would have the host wait for all the device was told before.
"""

import weakref
from typing import Any

import torch

PORTABLE = 1  # for all GPUs of the process


def to_device(values: Any, device: torch.device | str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.tensor` of numbers the host has."""
    return host_to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)  # also where another is the default


def host_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor of the host's on the device; what is written to the host's later is not in it, but on a CPU."""
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def empty_pinned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Host memory, not initialised, that this device copies from and to while the host goes on.

    For what is large and stays: torch's own pinned memory takes the next power of two.
    """
    host = torch.empty(shape, dtype=dtype, device="cpu")
    if torch.device(device).type == "cuda":
        runtime, address = torch.cuda.cudart(), host.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, host.nbytes, PORTABLE)))
        weakref.finalize(host, runtime.cudaHostUnregister, address)
    return host


class HostCopy:
    """A tensor on its way to the host, which may see to something else meanwhile. Nobody may write to it."""

    def __init__(self, tensor: torch.Tensor):
        self.host, self.arrived = tensor, None
        if tensor.is_cuda:
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record(torch.cuda.current_stream(tensor.device))  # not that of the current device

    def wait(self) -> torch.Tensor:
        """The tensor, in host memory."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host


class SideStream:
    """Copies to the host that the device's other work does not wait for."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        """A tensor of the current stream on its way to the host."""
        if self.stream is None or not tensor.is_cuda:
            return HostCopy(tensor)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        tensor.record_stream(self.stream)  # its memory is used again when it is copied
        with torch.cuda.stream(self.stream):
            return HostCopy(tensor)
