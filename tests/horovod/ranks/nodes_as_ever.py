"""One rank of nodes of two: cases that hold whatever way gradients travel; see `nodes.py`."""

import behave
import buckets
import cases
import horovod.torch as hvd
import torch

CASES = [
    buckets.ranks_compute_in_different_orders, buckets.the_order_of_the_gradients_changes_no_bit,
    buckets.a_step_that_broke_off_is_as_if_it_had_never_been,
    buckets.what_gathers_goes_on_after_a_step_that_broke_off,
    behave.mean_is_the_mean, behave.not_a_number_reaches_all, behave.sparse_travels_as_plain,
    behave.double_travels_as_plain, behave.resume,
    behave.gradients_of_two_passes_are_exchanged_once, behave.what_is_thrown_away_leaves_no_trace,
]  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    cases.main(CASES, hvd, before=cases.settle)
