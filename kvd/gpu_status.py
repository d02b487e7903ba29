"""Status codes of hipFile and cuFile, which number them alike, and what each means."""

from __future__ import annotations

GPU_STATUS_BASE = 5000
# The second member of an error counts only with this one: a code of HIP or of the CUDA driver.
GPU_DRIVER_ERROR = 5011

MEANINGS = {
    5001: "the kernel's driver is not loaded (cuFile: nvidia-fs; hipFile: amdgpu with AIS)",
    5002: "a property of the driver is not valid",
    5003: "a property of the driver is out of range",
    5004: "library and kernel driver are of different versions",
    5005: "the kernel driver's version cannot be read",
    5006: "the driver is closing",
    5007: "this platform is not supported",
    5008: "this file is not supported: its file system or device",
    5009: "this GPU is not supported",
    5010: "the kernel's driver failed",
    5011: "the GPU's driver failed",
    5012: "the address is not one of the GPU's",
    5013: "memory of this type is not supported",
    5014: "the range is not inside its allocation",
    5015: "the memory is of another GPU context",
    5016: "beyond the pinned memory",
    5017: "beyond the mapped memory",
    5018: "a file of this type is not supported",
    5019: "the file is open with flags that are not supported",
    5020: "the file is not open with O_DIRECT",
    5022: "an argument is not valid",
    5023: "the memory is registered already",
    5024: "the memory is not registered",
    5025: "permission denied: the driver's device or the file",
    5026: "the driver is open already",
    5027: "the file is not registered",
    5028: "the file is registered already",
    5029: "there is no such GPU",
    5030: "an internal error of the library",
    5031: "no further file descriptor",
    5033: "the kernel driver cannot be set up",
    5034: "the library's configuration forbids this file",
    5035: "a batch was not taken",
    5036: "the GPU's memory cannot be pinned",
    5037: "the batch queue is full",
    5038: "streams are not supported",
}


def gpu_status_words(code: int, gpu_code: int = 0) -> str:
    """Return what a status means."""
    words = MEANINGS.get(code, "unknown status")
    return f"{words}, status {gpu_code}" if code == GPU_DRIVER_ERROR else words
