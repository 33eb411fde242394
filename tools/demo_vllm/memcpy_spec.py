"""A test double of a GPU: vLLM's tiering with blocks that are copied in the processor's own memory.

vLLM's TieringOffloadingSpec refuses a machine without a GPU. This one differs in the worker that moves blocks
between the "GPU" and the first tier. Scheduler, connector, manager and tiers are vLLM's own. It is loaded by
`"spec_name": "MemcpyTieringSpec", "spec_module_path": "memcpy_spec"`, and is not for production.
"""

import time

import numpy as np
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
    """A chunk of the tier is one block of the "GPU" or more. Every transfer is over when its submit returns."""

    def __init__(self, spec, kv_caches):
        self._count = spec.blocks_per_chunk
        self._region = SharedOffloadRegion(
            engine_id=spec.config.engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        self._groups = kv_caches.group_data_refs
        self._far = [cache.tensor.view(torch.int8).view(-1, cache.page_size_bytes) for cache in kv_caches.tensors]
        self._near = [self._view(cache.page_size_bytes) for cache in kv_caches.tensors]
        self._finished = []

    def _view(self, page_size):
        """The tier's part of one tensor: chunk, block of it, byte."""
        view = self._region.create_next_worker_view(page_size * self._count)
        return view.view(len(view), self._count, page_size)

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id, far, near, is_store):
        begun, size, first, first_chunk = time.monotonic(), 0, 0, 0
        for references, count, index in zip(self._groups, far.group_sizes, far.block_indices, strict=True):
            if count:
                # A group's first block may lie in the midst of a chunk.
                places = np.arange(index % self._count, index % self._count + count)
                far_ids = torch.from_numpy(far.block_ids[first : first + count]).long()
                chunks = torch.from_numpy(near.block_ids[first_chunk + places // self._count]).long()
                within = torch.from_numpy(places % self._count)
                for reference in references:
                    page = slice(0, reference.page_size_bytes)
                    on_far, on_near = self._far[reference.tensor_idx], self._near[reference.tensor_idx]
                    if is_store:
                        on_near[chunks, within, page] = on_far[far_ids, page]
                    else:
                        on_far[far_ids, page] = on_near[chunks, within, page]
                    size += count * reference.page_size_bytes
                first += count
                first_chunk += int(places[-1]) // self._count + 1
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
