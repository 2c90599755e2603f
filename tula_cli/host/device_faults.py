"""The vendors' words for a faulty device or node, and for kernels that fail, as regular expressions; `outcome` reads them."""

_API = r"(?:\b(?:CUDA|Cuda|HIP|XPU)(?: runtime)? (?:error|failure)\b|\bTriton Error \[\w+\])[^\n]{0,40}?"
"""How torch, Triton, NCCL and RCCL begin what the runtime of a device has told them, with its number or none."""

NO_GPU = (
    "no GPU is to be seen: does the job ask for GPUs (on SLURM: cluster.slurm.gpus), and does nvidia-smi or rocm-smi show them?",
    (r"\bNo (?:CUDA|HIP) GPUs are available\b", r"\bFound no NVIDIA driver on your system\b", r"\bno (?:CUDA|ROCm)-capable device is detected\b",
     r"\b(?:cudaErrorNoDevice|hipErrorNoDevice|CUDA_ERROR_NO_DEVICE)\b", r"^(?:tula_cli\.errors\.)?NoGpu\b"),
)  # fmt: skip

DEVICE_FAULTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "the memory of a GPU or of the node has failed: tell the administrators, who can drain the node",
        (r"(?i:\buncorrectable (?:ECC|memory) error\b)", r"(?i:\bECC_?UNCORRECTABLE\b)", r"\bcudaErrorECCUncorrectable\b",
         r"\bhipErrorECCNotCorrectable\b", r"\bCUDA_ERROR_ECC_UNCORRECTABLE\b"),
    ),
    (
        "a link between GPUs has failed: tell the administrators, who can drain the node",
        (r"\buncorrectable NVLink error\b", r"\bInvalid access of peer GPU memory over nvlink or a hardware error\b",
         r"(?i:\b(?:cudaError|CUDA_ERROR_)Nvlink_?Uncorrectable\b)"),
    ),
    (
        "a GPU is gone: tell the administrators; nvidia-smi -q and dmesg tell more",
        # Xids of the hardware and of the link to it; those that a program causes are DEVICE_ERRORS.
        (r"\bXid\b[^\n]{0,40}: ?(?:46|48|54|6[1-4]|74|79|9[245]|1(?:09|10|19|2[0-4]|3[67]|4[0-9]|5[0-9]))\b",
         r"\bfallen off the bus\b", r"\bGPU is lost\b", r"(?:\b|_)GPU_IS_LOST\b", _API + r"\bunknown error\b",
         r"\bCUDA unknown error\b", r"\bNVML(?:Error)?\b[^\n]{0,30}\bUnknown Error\b", r"\bNVMLError_(?:Unknown|GpuIsLost|GPU_IS_LOST)\b",
         r"\bUnable to determine the device handle for \w+\b",
         r"\bGPU requires (?:a )?reset\b", r"\bamdgpu\b[^\n]*\b(?:GPU reset|ring \w+ timeout|uncorrectable)\b",
         _API + r"\boperation cannot be performed in the present state\b",
         r"\b(?:cudaErrorIllegalState|hipErrorIllegalState|CUDA_ERROR_ILLEGAL_STATE)\b",
         r"\b(?:cudaErrorUnknown|hipErrorUnknown|CUDA_ERROR_UNKNOWN)\b"),
    ),
    (
        "another process holds the GPU, or it is in exclusive mode: nvidia-smi shows who",
        (r"\bdevice(?:\(s\)|s)? (?:is/are|is|are) busy or unavailable\b", r"\bcudaErrorDevices?Unavailable\b",
         r"\bCUDA_ERROR_DEVICE_UNAVAILABLE\b"),
    ),
    (
        "the node's GPUs are not set up yet: its fabric manager has to run (nvidia-fabricmanager)",
        (r"\bError 802:", r"\bsystem not yet initialized\b",
         r"\b(?:cudaErrorSystemNotReady|CUDA_ERROR_SYSTEM_NOT_READY)\b"),
    ),
    (
        "the driver of the node's GPUs does not work, or its libraries are of another version: the node may need a restart",
        (r"\bFailed to initialize NVML\b", r"\bcouldn't communicate with the NVIDIA driver\b", r"\b(?:amdgpu not found in modules|ROCk module is NOT loaded)\b", r"\bNVMLError_(?:DriverNotLoaded|LibRmVersionMismatch)\b",
         r"\bError 80[34]:", r"\bforward compatibility was attempted on non supported HW\b",
         r"\b(?:cudaErrorCompatNotSupportedOnDevice|CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE)\b", r"\bunsupported display driver / cuda driver combination\b",
         r"\b(?:cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)\b",
         r"\bDriver/library version mismatch\b"),
    ),
    (
        "the MPS server of the node does not answer: it has to be restarted (nvidia-cuda-mps-control)",
        (r"\bMPS (?:server|client|control daemon)\b[^\n]*(?:fail|not ready|terminat|exceed|reached|(?<!without )error)",
         r"\bMPS RPC\b[^\n]*fail",
         r"\bhardware resources required to support (?:MPS client|device)\b[^\n]*exhausted\b", r"\bcudaErrorMps\w+", r"\bCUDA_ERROR_MPS_\w+"),
    ),
    (
        "InfiniBand may not lock enough memory: let the node's limit be unlimited (ulimit -l, memlock; for SLURM"
        " LimitMEMLOCK of slurmd, PropagateResourceLimitsExcept=MEMLOCK)",
        (r"\bibv_\w+[^\n]*(?:Cannot allocate memory|ENOMEM|\b(?:errno|error):? 12\b)",
         # Not the limit's name alone: `ulimit -a` prints it, and libibverbs warns of it where all goes on.
         r"\b(?:failed|ERROR)\b[^\n]*\b(?:max locked memory|RLIMIT_MEMLOCK)\b"),
    ),
    NO_GPU,  # the last: where the driver says why there is none, that is told
)  # fmt: skip
"""What is wrong with a node or a device, not with the program: what to do, and the vendors' words for it."""

DEVICE_ERRORS = (
    r"\b(?:an )?illegal memory access was encountered\b",
    r"\b(?:cudaErrorIllegalAddress|hipErrorIllegalAddress|CUDA_ERROR_ILLEGAL_ADDRESS)\b",
    r"\bunspecified launch failure\b",
    r"\b(?:cudaErrorLaunchFailure|hipErrorLaunchFailure|CUDA_ERROR_LAUNCH_FAILED)\b",
    _API + r"(?:\bmisaligned address|\ban illegal instruction was encountered|\binvalid program counter)",
    r"\bhardware stack error\b",
    r"\b(?:Memory access fault|HW Exception) by GPU\b",
    r"\bHSA_STATUS_ERROR_(?:MEMORY_APERTURE_VIOLATION|MEMORY_FAULT|ILLEGAL_INSTRUCTION|EXCEPTION)\b",
    r"\bXid\b[^\n]{0,40}: ?(?:13|31|43|45)\b",
    _API + r"\b(?:the launch timed out and was terminated|operation not supported on global/shared address space)",
    _API + r"\binvalid device ordinal\b",
    r"\b(?:CUDNN|CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE)_STATUS_(?:INTERNAL_ERROR|EXECUTION_FAILED)(?:_[A-Z]+)*\b",
    r"\bCUFFT_(?:INTERNAL_ERROR|EXEC_FAILED)\b",
    r"\bUR_RESULT_ERROR_DEVICE_LOST\b",
)
"""What a wrong kernel gives, and a failing device too: only another try tells them apart."""
