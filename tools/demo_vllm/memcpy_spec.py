"""A test double of a GPU: vLLM's tiering with blocks that are copied in the processor's own memory.

vLLM's TieringOffloadingSpec refuses a machine without a GPU. This one differs in the worker that moves blocks
between the "GPU" and the first tier. Scheduler, connector, manager and tiers are vLLM's own. It is loaded by
`"spec_name": "MemcpyTieringSpec", "spec_module_path": "memcpy_spec"`, and is not for production.
"""

import time

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        if not self._worker:
            self._worker = MemcpyWorker(self, kv_caches)
        return self._worker


class MemcpyWorker(OffloadingWorker):
    """One block of the "GPU" is one chunk of the tier. Every transfer is over when its submit returns."""

    def __init__(self, spec, kv_caches):
        assert spec.blocks_per_chunk == 1, "leave block_size of kv_connector_extra_config as it is"
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._groups = kv_caches.group_data_refs
        self._far = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
        self._near = [self._region.create_next_worker_view(cache.page_size_bytes) for cache in kv_caches.tensors]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, self._far, src_spec, self._near, dst_spec, src_spec.group_sizes)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._copy(job_id, self._near, src_spec, self._far, dst_spec, dst_spec.group_sizes)

    def _copy(self, job_id, sources, source, targets, target, group_sizes):
        begun, size, first = time.monotonic(), 0, 0
        for references, count in zip(self._groups, group_sizes, strict=True):
            rows = slice(first, first + count)
            source_ids = torch.from_numpy(source.block_ids[rows]).long()
            target_ids = torch.from_numpy(target.block_ids[rows]).long()
            for reference in references:
                page = slice(0, reference.page_size_bytes)
                rows_read = sources[reference.tensor_idx][source_ids, page]
                targets[reference.tensor_idx][target_ids, page] = rows_read
                size += rows_read.numel()
            first += count
        self._finished.append(TransferResult(job_id, True, size, time.monotonic() - begun))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass  # nothing is ever under way

    def shutdown(self):
        self._far, self._near = [], []
        self._region.cleanup()
