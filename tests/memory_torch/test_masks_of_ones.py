"""Masks of ones: a model may look at them in its plan as it does without one, and leave them out.

Found by running Llama with the attention mask that a tokenizer gives: plain it skipped the mask,
planned it computed with one, by another kernel.
"""

import pytest
import torch
from small_models import module_of, same_gradients

from sn_memory import PlanError
from sn_memory.torch import PlanWarning, TraceError, estimate, plan, trace, verify
from sn_memory.torch.model.step import run_step
from sn_memory.torch.model.tracker import AllocationTracker

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "graph"}
BATCH, LENGTH, WIDTH = 4, 8, 16


class Attention(torch.nn.Module):
    """Attention with a mask, which is left out where it masks nothing."""

    def __init__(self, looks="where it can"):
        super().__init__()
        self.words = torch.nn.Embedding(64, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.looks = looks

    def forward(self, ids, mask=None):
        bias = None
        if mask is not None and not self.masks_nothing(mask):
            bias = mask.bool()[:, None, None, :].expand(-1, 1, LENGTH, -1)
        x = self.words(ids)[:, None]
        for layer in self.layers:
            x = x + torch.nn.functional.scaled_dot_product_attention(x, x, layer(x), bias).tanh()
        return x[:, 0]

    def masks_nothing(self, mask):
        if self.looks == "all":
            return bool(mask.all())
        if self.looks == "list":
            return min(map(min, mask.tolist())) == 1
        # As in transformers: it looks where it can, and takes the way with a mask where not.
        fake = isinstance(mask, torch._subclasses.FakeTensor)
        return not fake and bool(mask.bool().all())


def ids_of(seed=0, batch=BATCH):
    return torch.randint(0, 64, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def padded(batch=BATCH):
    mask = torch.ones(batch, LENGTH, dtype=torch.long)
    mask[0, 5:] = 0
    return mask


def ones(batch=BATCH):
    return torch.ones(batch, LENGTH, dtype=torch.long)


def attention_masks(planned):
    """Of each call of attention in the plan made last, whether it takes a mask."""
    calls = planned.sn_memory.latest_trace.captured.recording.calls
    found = [it for it in calls if it.name == "_scaled_dot_product_flash_attention_for_cpu"]
    assert found
    return {it.arguments(lambda view: view)[1].get("attn_mask") is not None for it in found}


def planned_without_mask(model, sample, budget="90%"):
    planned = plan(model, sample, budget, **SETTINGS)
    assert attention_masks(planned) == {False}
    return planned


def ones_of(planned):
    """The places of the masks that the latest trace knows to be of ones."""
    return planned.sn_memory.latest_trace.captured.ones


# A sample's mask, the masks that come after it, and of which kinds the steps are.
CASES = {
    "planned for ones": (ones(), [padded(), ones(), padded(), ones()], [True, False]),
    # Found by a Trainer: a batch without padding, of the shape of one with some, was rounded.
    "planned for one that masks": (padded(), [ones(), padded(), ones()], [False, True]),
    "another batch of ones": (ones(), [ones(2), padded(2), ones(2)], [True, True, False]),
    # Found with dynamic padding: ones of a shape that came masked first took the mask's plan.
    "first masked": (ones(), [padded(2), ones(2), padded(2), ones(2)], [True, False, True]),
    "looked at once seen": (padded(), [ones(2), ones(), padded()], [False, True, True]),
}


@pytest.mark.parametrize("case", CASES)
def test_ones_and_what_masks_are_kinds_of_their_own(case):
    sample, masks, of_ones = CASES[case]
    model = Attention()
    planned = plan(model, (ids_of(), sample), "90%", **SETTINGS)
    assert attention_masks(planned) == {not of_ones[0]}
    for mask in masks:
        same_gradients(planned, model, ids_of(1, len(mask)), mask)
    kinds = planned.sn_memory.kinds
    assert [it.inputs.endswith("of ones") for it in kinds] == of_ones
    assert len(planned.sn_memory.steps) == len(of_ones)
    if case.startswith("planned"):
        says = "not all ones" if of_ones[0] else "all ones"
        assert [it.unlike for it in kinds] == ["", f"mask is {says}"]
        named = "ids (4, 8), mask (4, 8)"
        assert {it.inputs for it in kinds} == {named, f"{named} of ones"}
        assert verify(planned, (ids_of(), padded())).equal


def test_a_sample_without_a_plan_is_refused_with_what_differs():
    planned = plan(Attention(), (ids_of(), ones()), "90%", **SETTINGS)
    with pytest.raises(PlanError, match="no plan for this sample: mask is not all ones"):
        verify(planned, (ids_of(), padded()))
    with pytest.raises(PlanError, match=r"ids is int64 of shape \(2, 8\), and was"):
        verify(planned, (ids_of(0, 2), ones(2)))


def test_zeros_and_ones_that_are_no_mask_make_no_kinds():
    class Typed(Attention):
        def forward(self, ids, mask, types, labels):
            x = super().forward(ids, mask) + self.words(types)
            return torch.nn.functional.cross_entropy(x.mean(1), labels)

    model = Typed()
    zeros, labels = torch.zeros(BATCH, LENGTH, dtype=torch.long), torch.tensor([0, 1, 1, 0])
    planned = plan(model, (ids_of(), padded(), zeros, labels), "100%", **SETTINGS)
    assert planned.sn_memory.latest_trace.captured.looked == {1}
    for types in (zeros, ones()):
        planned(ids_of(1), padded(), types, labels | 1).backward()
    assert len(planned.sn_memory.kinds) == 1


@pytest.mark.parametrize("looks", ["all", "list"])
def test_a_model_that_can_only_look_is_planned_for_ones(looks):
    """Neither way can be traced without values; `tolist` does not even go through a dispatcher."""
    model = Attention(looks)
    with pytest.raises(TraceError):
        plan(model, (ids_of(), padded()), "90%", **SETTINGS)
    planned = planned_without_mask(model, (ids_of(), ones()))
    same_gradients(planned, model, ids_of(1), ones())
    with pytest.warns(PlanWarning, match="cannot be traced"):
        planned(ids_of(), padded()).sum().backward()
    model.zero_grad()
    same_gradients(planned, model, ids_of(1), padded())
    with pytest.raises(PlanError, match="mask is not all ones"):
        plan(model, (ids_of(), ones()), "90%", strict=True, **SETTINGS)(ids_of(), padded())


class Pooling(Attention):
    """Looks at the mask, and computes with it."""

    def forward(self, ids, mask, *, given_back=False):
        x = super().forward(ids, mask)
        share = mask / mask.sum(1, keepdim=True) + torch.zeros_like(x[..., 0])
        found = torch.einsum("btc,bt->bc", x, share)
        return (found, mask[:, :2]) if given_back else found


def test_a_mask_that_is_computed_with_is_an_input_as_well():
    model = Pooling()
    planned = planned_without_mask(model, (ids_of(), ones()))
    for mask in (ones(), padded()):
        same_gradients(planned, model, ids_of(1), mask)
    planned = plan(model, {"ids": ids_of(), "mask": ones(), "given_back": True}, "100%", **SETTINGS)
    mine, theirs = (it(ids_of(1), ones(), given_back=True) for it in (planned, model))
    assert all(map(torch.equal, mine, theirs))


def test_one_mask_given_twice_is_one():
    class Two(Attention):
        def forward(self, ids, mask, other):
            assert mask is other
            return super().forward(ids, mask)

    mask = ones()
    planned = planned_without_mask(Two(), (ids_of(), mask, mask))
    planned(ids_of(1), mask, mask).sum().backward()
    assert len(planned.sn_memory.steps) == 1


def test_values_lie_as_their_twins():
    """A mask cut out of a larger one, or turned, has values too."""
    wide, tall = torch.ones(8, 2 * LENGTH, dtype=torch.bool), torch.ones(LENGTH, BATCH).bool()
    words = torch.ones(BATCH, LENGTH + 2, dtype=torch.long)
    for mask in (wide[2:6, ::2], tall.T, words[:, 2:]):
        model = Attention()
        same_gradients(planned_without_mask(model, (ids_of(), mask)), model, ids_of(1), mask)


def test_a_kind_that_goes_takes_no_knowledge_with_it(monkeypatch):
    """Found by reading: with the plan for ones, the word that ones of that shape differ went."""
    monkeypatch.setattr("sn_memory.torch.planned.KINDS", 2)
    model = Attention()
    planned = plan(model, (ids_of(), ones()), "90%", **SETTINGS)
    for mask in (ones(1), padded(1), ones(2), padded(1), ones(1)):
        same_gradients(planned, model, ids_of(1, len(mask)), mask)
    names = [it.inputs.endswith("of ones") for it in planned.sn_memory.kinds]
    assert names == [True, False, True]
    assert len(planned.sn_memory.steps) == 3


def net(ends):
    """Layers, and then something done with what a mask is."""

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x).tanh()
        return ends(x, mask)

    return module_of(forward, layers=torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)))


def one_more(x, mask):
    own = mask.clone()
    torch._foreach_add_([own], 1)
    return x * own


def into_another(x, mask):
    wide = torch.zeros(mask.size(0), 16, dtype=torch.long)
    wide[:, :8] = mask
    return x if mask.all() else x * wide[:, :8]


def out_of_another(x, mask):
    sums = torch.zeros_like(mask)
    torch.add(mask, (x > 0).long(), out=sums)
    return x * sums if mask.all() else x


def longer(x, mask):
    """As peft's prompts: ones for what stands before the words."""
    whole = torch.cat([torch.ones(mask.size(0), 2, dtype=torch.long), mask], 1)
    return x if whole.all() else x * whole[:, 2:]


def nan_of_a_number(x, mask):
    return x.masked_fill(mask == 0, float("nan"))


def nan_of_a_constant(x, mask):
    return torch.where(mask == 0, torch.tensor([float("nan")] * 8), x)


def its_size(x, mask):
    return x * mask.size(0)


def all_of_it(x, mask):
    return x * 2 if mask.all() else x


BYTES = torch.ones(4, 8, dtype=torch.uint8)
# What a model does with a mask, the mask, and whether it is known then.
USES = [
    # Such a call returns nothing, and was taken for a look: its write was left out.
    (one_more, padded(4), False),
    # What stood next to what was written was taken to be written too, so no look was had.
    *((ends, ones(4), True) for ends in (into_another, out_of_another, longer)),
    # NaN equals nothing, so a model that never looks was planned for ones only.
    *((ends, ones(4), False) for ends in (nan_of_a_number, nan_of_a_constant)),
    # Found by running: these cannot be compared with 1, and `plan` raised.
    *((its_size, BYTES.view(it), False) for it in (torch.bits8, torch.uint4)),
    (its_size, torch.ones(4, 8, dtype=torch.uint16), False),
    # A batch without a sentence: all of its mask is ones, and a model may look.
    (all_of_it, torch.ones(0, 8, dtype=torch.long), True),
]


@pytest.mark.parametrize(("ends", "mask", "known"), USES)
def test_what_is_done_with_a_mask(ends, mask, known):
    model, sample = net(ends), (torch.randn(4, 8), mask)
    planned = plan(model, sample, "100%", **SETTINGS)
    assert ones_of(planned) == ({1} if known else frozenset())
    same_gradients(planned, model, *sample)
    if ends is one_more:
        # Nothing is tried at sight, so a wrong plan would be wrong results.
        same_gradients(planned, model, torch.randn(2, 8), ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_becomes_floats_is_looked_at(dtype):
    """Planned, and estimated, it was computed with, and left out by the plain model.

    Pegasus makes ones of floats for its decoder, and peft's prompt tuning puts them before a mask.
    """

    class Prompted(Attention):
        def forward(self, ids, mask):
            before = torch.ones(len(ids), 2, dtype=dtype)
            return super().forward(ids, torch.cat([before, mask[:, 2:].to(dtype)], 1))

    model = Prompted()
    planned = planned_without_mask(model, (ids_of(), ones()))
    for mask in (ones(), padded(), ones()):
        same_gradients(planned, model, ids_of(1), mask)
    assert len(planned.sn_memory.steps) == 2
    sample = ids_of(), ones()
    held = run_step(model, model, (sample, {}), kernels=True).peak_bytes
    assert estimate(model, sample).peak_bytes == held


def positions(ids):
    """Llama looks at the positions it makes itself where it gets no mask: whether they go on."""
    places = torch.arange(LENGTH).expand(len(ids), -1)
    return (places.diff(dim=1, prepend=places[:, :1] - 1) == 1).long()


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (positions, False),
        (torch.ones_like, False),
        (lambda ids: ids.new_full((len(ids), LENGTH), 1.0, dtype=torch.float32), False),
        (lambda ids: torch.zeros_like(ids) + torch.tensor([1]), False),
        (lambda ids: torch.full_like(ids, 2), False),
        (lambda ids: ids.new_zeros(len(ids), LENGTH), True),
        (lambda ids: torch.zeros_like(ids).add_(ids), None),
        (torch.empty_like, None),
    ],
    ids=["positions", "ones", "full", "a constant", "twos", "zeros", "written to", "empty"],
)
def test_what_follows_from_no_value_of_an_input_is_known(make, more):
    """Longformer makes a mask in the form of its words, and a constant with it."""

    class Own(Attention):
        def forward(self, ids):
            return super().forward(ids, make(ids))

    if not more:
        own = Own("all")
        if more is None:
            with pytest.raises(TraceError, match="depend on values"):
                trace(own, ids_of(), profile=False)
            return
        trace(own, ids_of(), profile=False)
    model = Own()
    planned = plan(model, ids_of(), "100%", **SETTINGS)
    assert attention_masks(planned) == {more}
    same_gradients(planned, model, ids_of(1))
    same_gradients(planned, model, ids_of(2, 2))
    assert ones_of(planned) == frozenset()
    # A plan holds its constants, so they count.
    held = run_step(model, model, ((ids_of(),), {}), kernels=True).peak_bytes
    assert 0 <= estimate(model, ids_of()).peak_bytes - held <= 8


def written(x, mask):
    """Writes what it computed into a copy of the mask, and looks at that."""
    own = mask.clone()
    own[:, :1] = (x.sum(1, keepdim=True) > 0).long()
    return x * 2 if own.all() else x


def looked(x, mask):
    """Ones are what many write for any input."""
    return x * 2 if x.sum() > 0 else x


def filled(x, mask):
    """What is made of none may be written to."""
    found = torch.zeros(4, 8)
    found[1:] = x[1:]
    return x * 2 if found.sum() > 0 else x


def counted(x, mask):
    found = torch.zeros(8, dtype=torch.long)
    found[:] = (x > 0).sum(0)
    return x if found.max() > 0 else x * 2


def drawn(x, mask):
    return x * 2 if torch.randint(2, (1,)) == 1 else x


def shuffled(x, mask):
    return x[torch.randperm(4)] if torch.randperm(4)[0] else x


@pytest.mark.parametrize("ends", [written, looked, filled, counted, drawn, shuffled])
def test_what_is_not_known_is_not_looked_at(ends):
    sample = (torch.ones(4, 8), ones(4))
    with pytest.raises(TraceError, match="depend on values"):
        trace(net(ends), sample, profile=False)
    if ends in (looked, filled, counted):
        with pytest.raises(TraceError, match="depend on values"):
            estimate(net(ends), sample)


def pairs(x, mask):
    return x * (mask[:, None] & mask[None])[0, :8]


def rounds(x, mask):
    for _ in range(20):
        mask = mask + torch.arange(len(mask)) // len(mask)
    return x * mask[:8]


@pytest.mark.rule_of_scratch
@pytest.mark.parametrize(("ends", "mask", "most"), [
    # All pairs were computed while planning, however many, and then let go.
    (pairs, torch.ones(5_000, dtype=torch.bool), 5_000**2),
    # All that was computed of masks and positions was held to the end of tracing.
    (rounds, torch.ones(1 << 17, dtype=torch.long), 10 * 8 << 17),
])  # fmt: skip
def test_what_is_large_is_not_computed_and_what_a_model_lets_go_is_let_go(ends, mask, most):
    with AllocationTracker([], kernels=True) as tracker:
        traced = trace(net(ends), (torch.randn(4, 8), mask), profile=False)
    assert traced.captured.ones == frozenset()
    assert tracker.peak_bytes - tracker.start_bytes < most


def test_of_several_ones_only_those_count_that_a_model_looks_at():
    """Found with T5: two masks count, and the words of a sample of ones counted with them.

    Words of ones are what many write in a sample.
    """

    class Two(Attention):
        def forward(self, ids, mask, other):
            x = super().forward(ids, mask)
            return x if self.masks_nothing(other) else x * other[..., None]

    model = Two()
    sample = (torch.ones(BATCH, LENGTH, dtype=torch.long), ones(), ones())
    planned = planned_without_mask(model, sample)
    assert ones_of(planned) == {1, 2}
    same_gradients(planned, model, ids_of(), ones(), ones())
    assert len(planned.sn_memory.steps) == 1
    for masks in ((padded(), ones()), (ones(), padded()), (padded(), padded())):
        same_gradients(planned, model, ids_of(), *masks)
    assert trace(Attention(), (sample[0],), profile=False).captured.ones == frozenset()


transformers = pytest.importorskip("transformers")


def small(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def test_models_of_transformers_with_a_tokenizers_mask():
    model = small("Mistral")
    sample = {"input_ids": ids_of(), "attention_mask": ones(), "labels": ids_of()}
    planned = plan(model, sample, "90%", **SETTINGS)
    for mask in (ones(), padded(), ones()):
        given = {**sample, "attention_mask": mask}
        same_gradients(planned, model, loss_of=lambda out: out.loss, **given)
    assert len(planned.sn_memory.steps) == 2
    del given["attention_mask"]
    same_gradients(planned, model, loss_of=lambda out: out.loss, **given)
    # As with dynamic padding: another length, and the first of it masks.
    for mask in (padded()[:, :6], ones()[:, :6]):
        ids = ids_of()[:, :6]
        given = {"input_ids": ids, "attention_mask": mask, "labels": ids}
        same_gradients(planned, model, loss_of=lambda out: out.loss, **given)
    assert verify(planned, sample).equal


@pytest.mark.parametrize("mask", [None, ones(), padded()], ids=["none", "ones", "masks"])
def test_an_estimate_looks_at_what_the_model_looks_at(mask):
    """Without a mask Llama looks at its own positions; the estimate was of a step with a mask."""
    model = small("Llama")
    sample = {"input_ids": ids_of(), "labels": ids_of()}
    sample |= {} if mask is None else {"attention_mask": mask}
    there = [*model.parameters(), *model.buffers(), *sample.values()]
    with AllocationTracker(there, kernels=True) as tracker:
        out = model(**sample)
        out.loss.backward()
    model.zero_grad()
    assert estimate(model, sample).peak_bytes == tracker.peak_bytes


def test_a_sparse_tensor_is_refused_by_name_and_estimated():
    """It has no memory to know it by; what it consists of has."""

    def gathered(x, mask):
        places = torch.stack([torch.arange(4), torch.arange(4)])
        return torch.sparse.mm(torch.sparse_coo_tensor(places, torch.ones(4), (4, 4)), x)

    model, sample = net(gathered), (torch.randn(4, 8), ones(4))
    with pytest.raises(TraceError, match="is sparse"):
        trace(model, sample)
    assert estimate(model, sample).peak_bytes > 0
