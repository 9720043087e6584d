"""Offloading of vLLM to host memory on a CPU.

Copies of blocks replace the transfers of a GPU. Scheduler, manager of the host blocks and events are those of vLLM.
"""

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        assert self.blocks_per_chunk == 1
        self._worker = self._worker or CopyingWorker(kv_caches, self.num_chunks)
        return self._worker


class CopyingWorker(OffloadingWorker):
    def __init__(self, kv_caches, chunks):
        self.device = [cache.tensor for cache in kv_caches.tensors]
        self.host = [torch.zeros((chunks, tensor.shape[1]), dtype=tensor.dtype) for tensor in self.device]
        self.finished = []

    def copy(self, job_id, source, destination, source_spec, destination_spec):
        blocks = [torch.from_numpy(spec.block_ids).long() for spec in (source_spec, destination_spec)]
        for taken, given in zip(source, destination):
            given[blocks[1]] = taken[blocks[0]]
        self.finished.append(TransferResult(job_id=job_id, success=True, transfer_size=None, transfer_time=None))
        return True

    def submit_store(self, job_id, source_spec, destination_spec):
        return self.copy(job_id, self.device, self.host, source_spec, destination_spec)

    def submit_load(self, job_id, source_spec, destination_spec):
        return self.copy(job_id, self.host, self.device, source_spec, destination_spec)

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass
