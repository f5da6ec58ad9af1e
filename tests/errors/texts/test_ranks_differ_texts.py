"""Full text of GA404 for each way in which ranks differ."""

from __future__ import annotations

import pytest

from graphaccel import errors

DIFFERENCES = [
    (
        errors.BatchesDiffer(
            step=4,
            ranks=(1,),
            what="inputs",
            expected="runs a training step on x float32[8, 6]",
            got="runs a training step on x float32[4, 6]",
        ),
        """\
error[GA404]: at step 4 the batch of rank 1 has other inputs or shapes than rank 0's
  rank 0  runs a training step on x float32[8, 6]
  rank 1  runs a training step on x float32[4, 6]
  why:  every rank is given the global batch and takes its own part of it
  help: seed the shuffling alike on every rank:  torch.manual_seed(0)
  help: and remove the DistributedSampler:  DataLoader(dataset, batch_size=..., shuffle=True)
  help: or keep the sampler, and say that each rank reads its own rows:  optimize(..., batch="local")
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(
            step=4,
            ranks=(1,),
            what="parts",
            expected="runs a training step on x float32[4, 6]",
            got="runs a training step on x float32[3, 6]",
        ),
        """\
error[GA404]: at step 4 the part of the batch of rank 1 has other inputs or shapes than rank 0's
  rank 0  runs a training step on x float32[4, 6]
  rank 1  runs a training step on x float32[3, 6]
  why:  with batch="local" all ranks give as many rows, of the same sizes
  help: leave out a last, smaller batch:  DataLoader(..., drop_last=True)
  help: and pad to the same length on every rank
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(step=4, ranks=(1,), what="rest"),
        """\
error[GA404]: at step 4 inputs of rank 1 that were not found to have rows differ from rank 0's
  why:  with batch="local" rows of the ranks are joined; all else that they give is the same
  help: say which dim of each input has the rows, 1 of `x` here:  optimize(..., batch="local", batch_dims={'x': 1})
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(
            step=4, ranks=(2,), what="call", expected="runs a training step", got="evaluates"
        ),
        """\
error[GA404]: at step 4 rank 2 does something else than rank 0
  rank 0  runs a training step
  rank 2  evaluates
  why:  every rank runs the same script and makes the same calls in the same order
  help: call it on every rank, not below `if rank == 0`
  help: and end the loop at the same step on every rank
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(step=4, ranks=(1,), what="state"),
        """\
error[GA404]: at step 4 values that the model's forward reads differ on rank 1 from rank 0's
  why:  every rank runs the same script and makes the same calls in the same order
  help: change the model's attributes on every rank, not below `if rank == 0`
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(step=4, ranks=(1,), what="optimizer"),
        """\
error[GA404]: at step 4 the optimizer of rank 1 differs from rank 0's, in its settings or in how often it stepped
  why:  every rank runs the same script and makes the same calls in the same order
  help: step optimizer and scheduler on every rank; give the scheduler the same metric:  scheduler.step(loss.item())
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(step=4, ranks=(1,), what="weights"),
        """\
error[GA404]: at step 4 the weights of rank 1 differ from those of a rank that holds the same part of the model
  why:  what one rank alone does to gradients or weights makes the models of the ranks drift apart
  help: clip, scale and set gradients and weights on every rank, not below `if rank == 0`
  help: and where they are changed by random numbers, draw on every rank alike:  torch.manual_seed(0)
  explain: graphaccel explain GA404""",
    ),
    (
        errors.BatchesDiffer(step=4, ranks=(1,), what="random"),
        """\
error[GA404]: at step 4 torch's random state on rank 1 differs from rank 0's
  why:  ranks that hold parts of one value draw its dropout mask alike
  help: draw on every rank alike, or from another generator:  torch.Generator()
  explain: graphaccel explain GA404""",
    ),
]


@pytest.mark.parametrize(("error", "text"), DIFFERENCES, ids=lambda v: getattr(v, "what", ""))
def test_text_of_each_way_in_which_ranks_differ(error: errors.BatchesDiffer, text: str) -> None:
    assert str(error) == text
