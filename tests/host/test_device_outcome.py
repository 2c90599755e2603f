"""Error texts of GPUs, drivers and libraries: the class of each, and the advice.

The words are the vendors' (CUDA, cuDNN, NCCL, ROCm, oneAPI, libibverbs, torch), as their sources and manuals have them; the
frames around them are made here.
"""

import pytest

from tula_cli.host.failure_texts import classify_failure, find_device_fault, find_line_of_failure
from tula_cli.host.failures import describe_advice, find_root_failure
from tula_cli.run.records.failures import Failure

ASYNCHRONOUS = "kernel errors might be asynchronously reported at some other API call."


def raised(kind: str, words: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    step()\n{kind}: {words}\n'


def cuda(words: str) -> str:
    return raised("torch.AcceleratorError", f"CUDA error: {words}\nCUDA {ASYNCHRONOUS}")


def plain(words: str) -> str:
    return raised("RuntimeError", words)


def nccl(kind: str, last: str) -> str:
    head = f"NCCL error in: ProcessGroupNCCL.cpp:12, {kind} (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3"
    return raised("torch.distributed.DistBackendError", f"{head}\n{kind}: as NCCL explains it.\nLast error:\n{last}")


def watchdog(words: str) -> str:
    head = "[rank2]:[E1122 12:00:00.1 ProcessGroupNCCL.cpp:9] [PG ID 0 PG GUID 0(default_pg) Rank 2]"
    return f"{head} {words}\nterminate called after throwing an instance of 'c10::DistBackendError'\n"


CUDA_CALL, SYSTEM, USAGE = "ncclUnhandledCudaError", "ncclSystemError", "ncclInvalidUsage"
REMOTE, INTERNAL = "ncclRemoteError", "ncclInternalError"
HSA = ":0:rocdevice.cpp:3006: 81 us: Callback: Queue 0x7e aborting with error : "
TIMEOUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=BROADCAST, Timeout(ms)=600000)"

FORMS = {
    "device_oom": [
        raised("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has 79.10 GiB."),
        cuda("out of memory\nSearch for `cudaErrorMemoryAllocation' in the manual"),
        raised("torch.OutOfMemoryError", "HIP out of memory. Tried to allocate 512.00 MiB. GPU 1 has 63.98 GiB"),
        plain("HIP error: out of memory\nHIP " + ASYNCHRONOUS),
        plain("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        nccl(CUDA_CALL, "Failed to CUDA calloc async 4194304 bytes"),
        nccl(CUDA_CALL, "Cuda failure 2 'out of memory'"),
        "node3:5:9 [1] NCCL WARN Cuda failure 2 'out of memory'\nNCCL WARN Failed to CUDA calloc 1048576 bytes\n",
        raised("torch._inductor.exc.InductorError", "OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB."),
        raised("RuntimeError", "Caught AcceleratorError in pin memory thread for device 1.\n" + cuda("out of memory")),
        plain("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
        plain("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        plain("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if the input is not contiguous."),
        plain("GET was unable to find an engine to execute this computation"),
        HSA + "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. code: 0x1008",
        plain("miopenStatusInternalError\nMIOpen(HIP): Error [EvaluateInvokers] out of memory"),
        plain("miopenStatusUnknownError"),
        plain("UR backend failed. UR backend returns:39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        # In the manner of those above.
        nccl(CUDA_CALL, "Failed to CUDA malloc 33554432 bytes"),
        "gpu07:81:90 [3] transport.cc:33 NCCL WARN Failed to CUDA calloc async 24 bytes\n" + nccl(CUDA_CALL, "see above"),
        plain("cuDNN Frontend error: CUDNN_STATUS_DEVICE_ALLOCATION_FAILED"),
        plain("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        plain("Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
        plain("level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
        plain("XPU out of memory. Tried to allocate 2.00 GiB (GPU 0; 63.98 GiB total capacity)"),
    ],
    "host_oom": [
        nccl(SYSTEM, "Error while creating shared memory segment /dev/shm/nccl-a1 (size 9637888), error: No space left on device (28)"),
        nccl(CUDA_CALL, "Failed to CUDA host alloc 65536 bytes"),
        nccl(SYSTEM, "Error while attaching to shared memory segment /dev/shm/nccl-a1 (size 9637888), error: No such file (2)"),
        nccl(SYSTEM, "Error: failed to extend /dev/shm/nccl-zfOoR6 to 33030528 bytes"),
        plain("level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)"),
    ],
    "device_fault": [
        cuda("uncorrectable ECC error encountered\nSearch for `cudaErrorECCUncorrectable' in the manual"),
        plain("CUDA error: unknown error"),
        plain("No CUDA GPUs are available"),
        cuda("CUDA-capable device(s) is/are busy or unavailable"),
        plain("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"),
        plain("Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was attempted on non supported HW"),
        plain("Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination"),
        cuda("uncorrectable NVLink error detected during the execution"),
        plain("CUDA error: the remote procedural call between the MPS server and the MPS client failed"),
        watchdog("Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"),
        nccl(SYSTEM, "Call to ibv_create_cq failed with error Cannot allocate memory"),
        nccl(SYSTEM, "Call to ibv_reg_mr failed with error Cannot allocate memory"),
        # In the manner of those above.
        plain("HIP error: uncorrectable ECC error encountered\nHIP " + ASYNCHRONOUS),
        plain("CUDA driver error: CUDA_ERROR_ECC_UNCORRECTABLE"),
        nccl(CUDA_CALL, "Cuda failure 214 'uncorrectable ECC error encountered'"),
        nccl(CUDA_CALL, "Cuda failure 'uncorrectable NVLink error detected during the execution'"),
        nccl(CUDA_CALL, "Cuda failure 999 'unknown error'"),
        nccl(CUDA_CALL, "Cuda failure 46 'all CUDA-capable devices are busy or unavailable'"),
        plain("HIP error: unknown error"),
        plain("No HIP GPUs are available"),
        plain("CUDA error: no CUDA-capable device is detected\nSearch for `cudaErrorNoDevice' in the manual"),
        plain("HIP error: no ROCm-capable device is detected"),
        cuda("system not yet initialized\nSearch for `cudaErrorSystemNotReady' in the manual"),
        plain("Failed to initialize NVML: Driver/library version mismatch"),
        cuda("MPS client failed to connect to the MPS control daemon or the MPS server"),
        cuda("the MPS server is not ready to accept new MPS client requests"),
        plain("CUDA error: MPS client has been terminated by the server: error\nSearch for `cudaErrorMpsClientTerminated'"),
        "[812.1] NVRM: Xid (PCI:0000:1b:00): 79, pid=4711, name=python, GPU has fallen off the bus.\n" + plain("CUDA error: 4"),
        "[91.2] NVRM: Xid (PCI:0000:9b:00): 94, pid=11, Contained: SM (0x1). RST: No, D-RST: No\n",
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this GPU\n",
        nccl(SYSTEM, "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory"),
        nccl(SYSTEM, "Call to ibv_create_qp failed with error Cannot allocate memory errno 12"),
        "UCX ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory : Please set max locked memory to 'unlimited'\n",
        raised("tula_cli.errors.NoGpu", "in whatever words"),
        plain("CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable"),
        cuda("the hardware resources required to support MPS client have been exhausted"),
        cuda("the hardware resources required to support device connections have been exhausted"),
        cuda("Invalid access of peer GPU memory over nvlink or a hardware error"),
        plain("nvmlDeviceGetHandleByUUID() failed: NVML_ERROR_GPU_IS_LOST"),
    ],
    "device_error": [
        cuda("an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in the manual"),
        cuda("unspecified launch failure"),
        nccl(CUDA_CALL, "Cuda failure 'invalid device ordinal'"),
        watchdog("Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered"),
        "Memory access fault by GPU node-2 (Agent handle: 0x5f) on address 0x7e00. Reason: Unknown.\n",
        HSA + "HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory. code: 0x29",
        plain("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
        plain("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        plain("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`"),
        # In the manner of those above.
        plain("HIP error: an illegal memory access was encountered"),
        cuda("misaligned address"),
        cuda("an illegal instruction was encountered"),
        nccl(CUDA_CALL, "Cuda failure 719 'unspecified launch failure'"),
        nccl(CUDA_CALL, "Cuda failure 101 'invalid device ordinal'"),
        plain("Triton Error [CUDA]: an illegal memory access was encountered"),
        plain("Triton Error [CUDA]: misaligned address"),
        plain("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER"),
        plain("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE"),
        plain("CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx(handle)`"),
        plain("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`"),
        plain("cuFFT error: CUFFT_EXEC_FAILED"),
        cuda("the launch timed out and was terminated"),
        cuda("operation not supported on global/shared address space"),
        "HW Exception by GPU node-1 (Agent handle: 0x5f) reason :GPU Hang\n",
        HSA + "HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception. code: 0x1016",
        "[91.2] NVRM: Xid (PCI:0000:9b:00): 31, pid=11, name=python, MMU Fault: ENGINE GRAPHICS\n",
    ],
    "peer": [
        nccl(SYSTEM, "socketStartConnect: Connect to 10.1.0.4<40001> failed : Software caused connection abort"),
        nccl(INTERNAL, "Proxy Call to rank 3 failed (Connect)"),
        nccl(REMOTE, "socketProgress: Connection closed by remote peer node9<51712>"),
        nccl(REMOTE, "NET/IB: Got completion from peer 10.1.0.4<9> with status=IBV_WC_RETRY_EXC_ERR(12) vendor err 129"),
        watchdog(TIMEOUT + " ran for 600021 milliseconds before timing out."),
        "[rank3]:[F1122 ProcessGroupNCCL.cpp:15] [Rank 3] Terminating the process after attempting to dump debug info,"
        " due to ProcessGroupNCCL watchdog hang.\n",
        # In the manner of those above.
        nccl(INTERNAL, "Proxy Call to rank 11 failed (Setup)"),
        nccl(INTERNAL, "proxy.cc:1533 Proxy call to rank 0 failed (SharedInit)"),
        nccl(SYSTEM, "ncclSocketProgress: Connection reset by peer node4<33000>"),
    ],
    "user": [
        raised("triton.runtime.errors.OutOfResources", "out of resource: shared memory, Required: 294912, Hardware limit: 232448."),
        plain("The NVIDIA driver on your system is too old (found version 11070)."),
        cuda("no kernel image is available for execution on the device"),
        cuda("device-side assert triggered"),
        nccl(USAGE, "Duplicate GPU detected : rank 3 and rank 1 both on CUDA device 3b000"),
        nccl(CUDA_CALL, "Cuda failure 'peer access is not supported between these two devices'"),
        nccl(USAGE, "No algorithm/protocol available for function Broadcast with datatype ncclInt8. NCCL_ALGO was set to tree."),
        plain("Expected canUse32BitIndexMath(input) && canUse32BitIndexMath(output) to be true, but got false."),
        # In the manner of those above.
        nccl(USAGE, "Multiple Ranks are using the same GPU/Partition: rank 1 and rank 0"),
        plain("HIP error: invalid device function"),
        cuda("device-side assert triggered") + plain("CUDA error: unspecified launch failure"),
        raised("ValueError", "the sensor is busy or unavailable, unknown error"),
        raised("urllib.error.HTTPError", "HTTP Error 503: upstream MPS"),
        "MPS control daemon started without error\n" + plain("what a prologue said is no fault"),
        "max locked memory       (kbytes, -l) unlimited\n" + plain("what a `ulimit -a` in setup printed is no fault"),
        "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.\n" + plain("a warning that ended nothing"),
    ],
}  # fmt: skip
DIED = ("terminate called", "rocdevice.cpp", "by GPU node-", "Terminating the process")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [(outcome, text) for outcome, texts in FORMS.items() for text in texts],
    ids=lambda value: " ".join(value.split())[-60:],
)
def test_each_form_is_of_its_class(outcome: str, text: str) -> None:
    exit_code = -6 if any(words in text for words in DIED) else 1
    assert classify_failure(text, exit_code=exit_code) == outcome
    prefixed = "".join(f"[rank5]: {line}\n" for line in text.splitlines())
    assert classify_failure(prefixed, exit_code=exit_code) == outcome, "as torchrun and srun prefix it"


@pytest.mark.parametrize("text", FORMS["device_fault"] + FORMS["device_error"])
def test_the_line_that_tells_of_a_fault_is_found_in_a_log(text: str) -> None:
    answer = find_line_of_failure(f"epoch 1\nloss 0.3\n{text}\nlast words of a peer\n")
    assert answer
    assert answer in text
    assert classify_failure(answer) in ("device_fault", "device_error")


def test_other_endings_have_no_such_line() -> None:
    assert all(find_line_of_failure(text) == "" for outcome in ("device_oom", "peer") for text in FORMS[outcome])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "memory of a GPU"),
        ("CUDA-capable device(s) is/are busy or unavailable", "see nvidia-smi"),
        ("Error 802: system not yet initialized", "fabric manager"),
        ("Call to ibv_reg_mr failed with error Cannot allocate memory", "ulimit -l"),
        ("NoGpu: in whatever words: No CUDA GPUs are available", "cluster.slurm.gpus"),
        ("NoGpu: in whatever words: Error 802: system not yet initialized", "fabric manager"),
        ("", "administrators"),
    ],
)
def test_the_advice_is_by_what_is_wrong(words: str, told: str) -> None:
    advice = describe_advice(Failure(outcome="device_fault", fault=find_device_fault(words)))
    assert told in advice and "\n" not in advice


def test_a_faulty_device_outweighs_what_the_others_say() -> None:
    def failure(outcome: str, at: float) -> Failure:
        return Failure(
            task="t", attempt=1, rank=int(at), host=f"n{at:g}", pid=1, outcome=outcome, message="", detail="", failed_at=at
        )  # fmt: skip

    root_failure = find_root_failure([failure("user", 1), failure("peer", 2), failure("device_fault", 3)])
    assert root_failure is not None
    assert root_failure.host == "n3"
