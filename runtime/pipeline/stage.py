"""One chunk as a stage of ``torch.distributed.pipelining``: what torch's schedules tell a stage to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cost_models.schedules import Action
from runtime.pipeline.backward import Gradient, backward, input_backward
from runtime.pipeline.named_actions import action
from runtime.pipeline.specs import StageRunner, TensorSpec, check_tensors
from runtime.torch_compat.pipelining import PipelineStageBase, issue_transfers, neighbour_transfers


class PipelineStage(PipelineStageBase):
    """Runs a ``StageRunner`` forward and backward, and says which tensors are to be sent and received.

    In the place of torch's ``PipelineStage``, which

    * agrees on shapes by messages, where here they are known;
    * holds a buffer for every received tensor and gradient of all micro-batches for ever, where here a buffer lives
      from the moment it is to receive until the backward pass is done;
    * in its split backward runs too much, or fails (see ``runtime.pipeline.backward``).

    Args:
        runner: the chunk.
        num_stages: chunks in the pipeline.
        device, group: of the pipeline's ranks.
        sends_itself: send at once rather than hand the sends to torch's runtime, which would hold on to every sent
            tensor until the end of the step.
        record: called with every action that has run.
    """

    def __init__(
        self,
        runner: StageRunner,
        *,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        sends_itself: bool,
        record: Callable[[Action], None],
    ) -> None:
        super().__init__(nn.Module(), runner.index, num_stages, device, group)
        self.runner = runner
        self.process_group = group
        self.sends_itself = sends_itself
        self.record = record
        #: The gradient that the loss starts from in this step.
        self.loss_weight = 1.0
        #: Bytes handed to the process group in this step, by the chunk that they go to.
        self.sent_bytes: Counter[int] = Counter()
        #: Sends under way, by (chunk they go to, micro-batch).
        self._works: dict[tuple[int, int], list[dist.Work]] = {}
        self._clear()

    def _clear(self) -> None:
        self._received: dict[int, tuple[torch.Tensor, ...]] = {}
        self._arrived_gradients: dict[int, tuple[Gradient, ...]] = {}
        self._ran: dict[int, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}
        self._input_gradients: dict[int, tuple[Gradient, ...]] = {}
        self._weight_backwards: dict[int, Callable[[], None]] = {}

    # -- what runs ----------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        received = tuple(
            tensor.requires_grad_(spec.requires_grad)
            for tensor, spec in zip(self._received.pop(fwd_chunk_id, ()), self.runner.received, strict=True)
        )
        with action("F", self.stage_index, fwd_chunk_id):
            outputs = self.runner.run(received, fwd_chunk_id)
        if not self.is_last:
            check_tensors(outputs, self.runner.sent, chunk=self.stage_index)
        self._ran[fwd_chunk_id] = (received, outputs)
        self.record(Action("F", self.stage_index, fwd_chunk_id))
        # the schedule keeps losses until the step ends, which must not keep the graph
        return outputs[0].detach() if self.is_last else outputs

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if any(spec.requires_grad for spec in self.runner.sent):
            # the gradient is here, so what was sent has arrived
            self._wait_for_send(self.stage_index + 1, bwd_chunk_id)
        received, outputs = self._ran.pop(bwd_chunk_id)
        gradients = self._output_gradients(bwd_chunk_id, outputs)
        with action("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            if full_backward:
                input_gradients = backward(outputs, gradients, received)
            else:
                input_gradients, self._weight_backwards[bwd_chunk_id] = input_backward(outputs, gradients, received)
        if not self.is_first:
            self._input_gradients[bwd_chunk_id] = input_gradients
        self.record(Action("B" if full_backward else "I", self.stage_index, bwd_chunk_id))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with action("W", self.stage_index, bwd_chunk_id):
            self._weight_backwards.pop(bwd_chunk_id)()
        self.record(Action("W", self.stage_index, bwd_chunk_id))

    def _output_gradients(self, microbatch: int, outputs: tuple[torch.Tensor, ...]) -> tuple[Gradient, ...]:
        if self.is_last:
            return (torch.full_like(outputs[0], self.loss_weight),)
        return self._arrived_gradients.pop(microbatch)

    # -- between ranks ------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        buffers = tuple(self._empty(spec) for spec in self.runner.received)
        self._received[fwd_chunk_id] = buffers
        return [self._operation(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        outputs = [output.detach() for output in self._ran[fwd_chunk_id][1]]
        return self._send(outputs, self.stage_index + 1, fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        buffers = tuple(self._empty(spec) if spec.requires_grad else None for spec in self.runner.sent)
        self._arrived_gradients[bwd_chunk_id] = buffers
        return [self._operation(dist.irecv, b, self.stage_index + 1) for b in buffers if b is not None]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        pairs = zip(self._input_gradients.pop(bwd_chunk_id), self.runner.received, strict=True)
        gradients = [
            self._empty(spec).zero_() if gradient is None else gradient
            for gradient, spec in pairs
            if spec.requires_grad
        ]
        return self._send(gradients, self.stage_index - 1, bwd_chunk_id)

    def _empty(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def _operation(self, operation: Callable[..., Any], tensor: torch.Tensor, chunk: int) -> dist.P2POp:
        peer = dist.get_global_rank(self.process_group, self.stage_index_to_group_rank[chunk])
        return dist.P2POp(operation, tensor, peer, self.process_group)

    def _send(self, tensors: list[torch.Tensor], chunk: int, microbatch: int) -> list[dist.P2POp]:
        tensors = [tensor.contiguous() for tensor in tensors]
        self.sent_bytes[chunk] += sum(tensor.nbytes for tensor in tensors)
        operations = [self._operation(dist.isend, tensor, chunk) for tensor in tensors]
        if not self.sends_itself:
            return operations
        for key in [key for key, works in self._works.items() if all(work.is_completed() for work in works)]:
            self._wait_for_send(*key)
        self._works[chunk, microbatch] = issue_transfers(operations)
        return []

    def _wait_for_send(self, chunk: int, microbatch: int) -> None:
        for work in self._works.pop((chunk, microbatch), ()):
            work.wait()

    def wait_for_sends(self) -> None:
        """Wait until all sends of this stage have completed."""
        for key in list(self._works):
            self._wait_for_send(*key)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [operation for operation in neighbour_transfers(self) if operation.group_peer != self.group_rank]

    # -- between chunks of one rank -----------------------------------------------------------------------------

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._received[mb_index] = tuple(output.detach() for output in prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Gradient, ...]:
        return self._input_gradients.pop(mb_index)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Gradient, ...], mb_index: int) -> None:
        self._arrived_gradients[mb_index] = next_stage_bwd_outputs

    # -- a step's start and end, as torch's schedules ask for it ------------------------------------------------

    def clear_runtime_states(self) -> None:
        self._clear()
        self.sent_bytes.clear()

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        self.args_recv_info, self.act_send_info = {0: ()}, {}
        return ()

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        return None

    def _create_grad_recv_info(self, act_send_info: dict[int, list[int]]) -> tuple[Any, ...]:
        return ()
