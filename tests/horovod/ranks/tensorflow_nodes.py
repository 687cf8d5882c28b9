"""One rank of TensorFlow on nodes of two, as horovodrun -H HOST:2,HOST:2 makes them."""

import copy
from functools import partial

import cases
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
import tensors
from tensors import assert_equal_ranks as assert_alike
from tensors import flat_of, means_of

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.errors import CompressError
from sn_compress.tensorflow.keras import DistributedOptimizer
from sn_compress.tensorflow.tape import memory_of

SHARED = LowRankCompression.using(ratio=8, warmup=2, every=20)
WAYS = {"fft": FFTCompression.using(), "low rank": SHARED}
SHAPES = [(64, 48), (48,), (48, 96), (96,), (96, 64), (64,)]
REFUSED = CompressError, tf.errors.OpError


def fresh(way, **changes):
    return WAYS[way].using(**changes)


def net(shapes=SHAPES):
    generator = np.random.default_rng(0)
    return [
        tf.Variable(generator.standard_normal(shape).astype("f4") * 0.2, name=f"v{at}")
        for at, shape in enumerate(shapes)
    ]


def batch(step):
    generator = np.random.default_rng([step, hvd.rank()])
    return tf.constant(generator.standard_normal((16, 64)).astype("f4"))


def step_of(variables, compression, *, graph=True):
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=compression) as tape:
            out = x
            for matrix, offset in zip(variables[::2], variables[1::2], strict=True):
                out = tf.tanh(out @ matrix + offset)
            loss = tf.reduce_mean((out - x) ** 2)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.5 * gradient)
        return loss

    return tf.function(step) if graph else step


def train(variables, compression, steps, *, graph=True):
    step = step_of(variables, compression, graph=graph)
    return [float(step(batch(at))) for at in steps]


def vector(variables):
    return flat_of(variables).numpy()


def each_tensor_has_one_owner_in_a_node():
    """On the host, and as nodes of the graph; alike in what is sent inside."""
    for way in WAYS:
        for graph in (False, True):
            variables, own = net(), fresh(way)
            train(variables, own, range(14), graph=graph)
            assert_alike(variables)
            memory = memory_of(own)
            assert bool(memory.graphs) == graph, (way, graph)
            report = memory.report()
            assert report["nodes"] == 2
            elements = sum(v.shape.num_elements() for v in variables if len(v.shape) > 1)
            # In a graph a word goes along with the means.
            assert 0 <= report["inside_bytes"] - 4 * elements <= 4 * graph, (way, graph, report)
            for at, variable in enumerate(variables):
                if len(variable.shape) > 1:
                    name = f"{at}:v{at}"
                    owner = memory.nodes.place.owners.of_name[name]
                    has = hvd.allgather_object(memory.remembers(name))
                    assert has == [rank % 2 == owner for rank in range(4)], (name, has)


def given(step, shapes):
    generator = np.random.default_rng([step, hvd.rank()])
    return [generator.standard_normal(shape).astype("f4") for shape in shapes]


def takes(variables, compression, applies=None):
    """A step whose gradients are what it is called with."""

    means = means_of(variables, compression, graph=False)

    def step(*wanted):
        gradients = means(*wanted)
        if applies is None or applies:
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign_sub(gradient)

    return step


def nodes_of_a_graph_have_the_bits_of_the_host():
    """Of payloads; of sums the array code has others. In the long run nothing is lost."""
    shapes = [(64, 48), (48, 96), (96, 64)]
    for way in WAYS:
        ends = []
        for graph in (False, True):
            variables, own = net(shapes), fresh(way)
            before, step = vector(variables), takes(variables, own)
            run = tf.function(step) if graph else step
            for at in range(16):
                run(*map(tf.constant, given(at, shapes)))
            assert bool(memory_of(own).graphs) == graph
            assert_alike(variables)
            ends.append(vector(variables))
            kept = np.concatenate(list(left_of(own, variables).values()))
            every = [np.concatenate([np.ravel(w) for w in given(at, shapes)]) for at in range(16)]
            wanted = np.mean(hvd.allgather_object(np.sum(every, axis=0)), axis=0)
            assert np.linalg.norm(kept) > 0.1 * np.linalg.norm(wanted)
            lost = before - ends[-1] + kept - wanted
            assert np.linalg.norm(lost) < 1e-4 * np.linalg.norm(wanted), np.linalg.norm(lost)
        assert way != "fft" or np.array_equal(*ends)


def without_a_hierarchy_all_is_as_on_one_node():
    """To the bit, and in as many bytes; a tuner has none either."""
    for way in WAYS:
        ends = []
        for size, own in ((4, fresh(way)), (2, fresh(way, hierarchy=None))):
            with cases.on_nodes_of(size, hvd.rank()):
                variables = net([(64, 64), (64,)])
                train(variables, own, range(5))
            report = memory_of(own).report()
            assert "nodes" not in report
            ends.append((vector(variables), report["payload_bytes"]))
        # Small tensors are summed by Horovod, which sums those together that come together.
        assert np.allclose(ends[0][0], ends[1][0], atol=1e-5)
        assert ends[0][1] == ends[1][1]
    tuned, variables = AutoCompression.using(ratio=8, warmup=2), net([(64, 64), (64,)])
    train(variables, tuned, range(3))
    assert "nodes" not in memory_of(tuned).report()


def unequal_nodes_exchange_as_without():
    """Three ranks here and one there: a warning on rank 0, and all exchange with all."""
    with cases.on_nodes_of(3, hvd.rank()), cases.logged() as said:
        variables, own = net(), fresh("fft")
        train(variables, own, range(2))
    assert "nodes" not in memory_of(own).report()
    warned = [text for text in said if "nodes have 3 and 1 ranks" in text]
    assert len(warned) == (hvd.rank() == 0), said
    assert_alike(variables)


def what_was_dropped_is_not_sent_later():
    """Gradients that nobody applies leave no trace at their owners, on the host and in a graph."""
    shapes = [(64, 48), (48, 96), (96, 64)]
    for way in WAYS:
        for graph in (False, True):
            variables, own = net(shapes), fresh(way)
            applies = tf.Variable(True)
            step, memory = takes(variables, own, applies), memory_of(own)
            run = tf.function(step) if graph else step
            for at in range(14):
                run(*map(tf.constant, given(at, shapes)))
            applies.assign(False)
            run(*map(tf.constant, given(14, shapes)))
            before = left_of(own, variables)
            assert bool(memory.graphs) == graph
            for _ in range(2):  # takes the one before back, and sends the same again
                run(*map(tf.constant, given(14, shapes)))
                for name, left in left_of(own, variables).items():
                    assert np.allclose(left, before[name], atol=1e-4), name
            assert_alike(variables)


def keras_trains_by_nodes():
    for way in WAYS:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(96, "tanh"), keras.layers.Dense(64)]
        )
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(0.5), compression=fresh(way), groups=1 if way == "fft" else None
        )
        model.compile(optimizer, "mse")
        x = np.concatenate([batch(at).numpy() for at in range(16)])
        model.fit(x, x, 16, verbose=0, shuffle=False)
        assert FFTCompression.report(optimizer)["nodes"] == 2
        assert_alike([v.value for v in model.trainable_variables])
        left = FFTCompression.residuals(optimizer)
        every = hvd.allgather_object(sorted(left))
        assert every[:2] == every[2:]
        assert sorted(every[0] + every[1]) == sorted(
            v.path for v in model.trainable_variables if len(v.shape) > 1
        )
        _goes_on_when_restarted(optimizer, left)


def _goes_on_when_restarted(optimizer, left):
    """Whoever owns a tensor then: in the mean, what was left comes with the next gradients."""
    sums = {}
    for each in hvd.allgather_object(left):
        for path, values in each.items():
            sums[path] = sums.get(path, 0) + values / hvd.size()
    if hvd.rank() < 2:  # as if all of a node's had been the other one's
        left = hvd.allgather_object(left)[1 - hvd.rank()]
    else:
        left = hvd.allgather_object(left)[5 - hvd.rank()]
    FFTCompression.restart(optimizer, left)
    variables = optimizer._trainable_variables
    before = [v.numpy() for v in variables]
    optimizer.apply([tf.zeros(v.shape) for v in variables])
    kept = hvd.allgather_object(FFTCompression.residuals(optimizer))
    for variable, old in zip(variables, before, strict=True):
        if variable.path not in sums:
            continue
        sent = (old - variable.numpy()) / 0.5
        rest = sum(each[variable.path] for each in kept if variable.path in each) / hvd.size()
        error = np.linalg.norm(sent + rest - sums[variable.path])
        assert error <= 1e-5 * np.linalg.norm(sums[variable.path]) + 1e-5, (variable.path, error)


def variables_may_be_arguments():
    """A trace that serves any variables: their names are known when it runs."""
    own = fresh("fft")
    pairs = [net([(64, 64), (64,)]), net([(64, 64), (64,)])]

    @tf.function
    def step(x, matrix, offset):
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=own) as tape:
            loss = tf.reduce_mean((tf.tanh(x @ matrix + offset) - x) ** 2)
        for variable, gradient in zip(
            (matrix, offset), tape.gradient(loss, (matrix, offset)), strict=True
        ):
            variable.assign_sub(0.5 * gradient)

    for at in range(4):
        for pair in pairs:
            step(batch(at), *pair)
    for pair in pairs:
        assert_alike(pair)
    assert memory_of(own).report()["nodes"] == 2


def left_of(own, variables):
    """What all ranks have yet to send, as it is in the mean: by name."""
    memory, found = memory_of(own), {}
    for at, variable in enumerate(variables):
        name = f"{at}:v{at}"
        mine = memory.residual(name) if memory.remembers(name) else None
        every = hvd.allgather_object(mine)
        zero = np.zeros(variable.shape.num_elements(), "f4")
        found[name] = sum((each if each is not None else zero) for each in every) / hvd.size()
    return found


def goes_on_with(load, way, first, then):
    """What was left to be sent is still there, when all have begun with other nodes."""
    variables, own = net(), fresh(way, hierarchy=first)
    train(variables, own, range(4), graph=False)
    left = left_of(own, variables)
    every = hvd.allgather_object(copy.deepcopy(memory_of(own).state_dict()))
    again, other = net(), fresh(way, hierarchy=then)
    for variable, value in zip(again, variables, strict=True):
        variable.assign(value)
    load(memory_of(other), every)

    with hvd.DistributedGradientTape(tf.GradientTape(), compression=other) as tape:
        loss = tf.add_n([tf.reduce_sum(v) * 0.0 for v in again])
    sent = tape.gradient(loss, again)
    now = left_of(other, again)
    for at, gradient in enumerate(sent):
        name = f"{at}:v{at}"
        lost = np.linalg.norm(gradient.numpy().ravel() + now[name] - left[name])
        assert lost <= 1e-5 * np.linalg.norm(left[name]) + 1e-6, (name, lost)
    train(again, other, range(4, 6))
    assert_alike(again)


def a_run_goes_on_with_other_nodes():
    def load_list(memory, every):
        memory.load_state_dict(every)

    def load_and_synchronize(memory, every):
        memory.load_state_dict(every[hvd.rank()])
        memory.synchronize(1)

    for way, load in zip(WAYS, (load_list, load_and_synchronize), strict=True):
        goes_on_with(load, way, "auto", None)
        goes_on_with(load, way, None, "auto")


def a_run_goes_on_on_the_same_nodes():
    """With the bits of one that was not interrupted, from a checkpoint of each rank."""
    for way in WAYS:
        shapes = [(64, 64), (64,)]  # one small tensor: Horovod has nothing to fuse
        variables, own = net(shapes), fresh(way)
        train(variables, own, range(6))
        saved, state = [v.numpy() for v in variables], memory_of(own).serialize()
        train(variables, own, range(6, 10))
        again, other = net(shapes), fresh(way)
        for variable, value in zip(again, saved, strict=True):
            variable.assign(value)
        memory_of(other).deserialize(state)
        train(again, other, range(6, 10))
        every = [vector(variables), vector(again)]
        assert np.allclose(*every, atol=1e-6), np.abs(every[0] - every[1]).max()


def one_state_is_not_enough_for_other_nodes():
    for way in WAYS:
        for first, then in (("auto", None), (None, "auto")):
            variables, own = net(), fresh(way, hierarchy=first)
            train(variables, own, [0], graph=False)
            state = memory_of(own).state_dict()
            again, other = net(), fresh(way, hierarchy=then)
            memory_of(other).load_state_dict(state)
            said = cases.message_of(partial(train, again, other, [0]), REFUSED)
            assert "Load the list" in said, said


def a_rank_that_joins(variables, own, step, steps, *, graph=True, advice="with hierarchy=None"):
    """Refused by all others before anything is summed, also what travels plain; all can go on.

    Once in a process: in TensorFlow `hvd.join()` of Horovod 0.28.1 returns at once when it is
    called a second time.
    """
    for at in range(steps):
        step(batch(at))
    assert bool(memory_of(own).graphs) == graph
    before = vector(variables)
    if hvd.rank():
        said = cases.message_of(partial(step, batch(steps)), REFUSED)
        assert "another rank called hvd.join()" in said, said
        assert advice in said, said
    hvd.join()
    assert np.array_equal(vector(variables), before)
    assert_alike(variables)
    for at in range(steps, steps + 3):
        step(batch(at))
    assert not np.array_equal(vector(variables), before)
    assert_alike(variables)


def a_rank_joins_at_a_step_of_the_graph():
    variables, own = net(), fresh("fft")
    a_rank_that_joins(variables, own, step_of(variables, own), 4)


def a_rank_joins_at_a_step_on_the_host():
    variables, own = net(), fresh("low rank")
    with cases.on_nodes_of(2, hvd.rank()):  # the first of two dense steps
        a_rank_that_joins(variables, own, step_of(variables, own), 1, graph=False)


def a_rank_joins_without_nodes():
    """A gather is refused; what travels plain is summed as Horovod does it, so there is none."""
    variables, own = tensors.variables_of(2, side=64), fresh("fft")
    step = tensors.step_of(variables, own)
    a_rank_that_joins(variables, own, step, 4, advice="use LowRankCompression")


def many_nodes_learn_as_without():
    """Three nodes of two: sums go in pieces, payloads by way of owners."""
    shapes = [(64, 96), (96,), (96, 64), (64,)]
    for way in WAYS:
        found = []
        for hierarchy, graph in (("auto", True), ("auto", False), (None, True)):
            variables = net(shapes)
            own = fresh(way, hierarchy=hierarchy, **({"block": 64} if way == "fft" else {}))
            with cases.on_nodes_of(2, hvd.rank()):
                losses = train(variables, own, range(24), graph=graph)
            assert_alike(variables)
            assert memory_of(own).report().get("nodes") == (3 if hierarchy else None)
            found.append(np.mean(hvd.allgather_object(float(np.mean(losses[-5:])))))
        assert max(found[:2]) < found[2] * 1.15, found


CASES = [
    each_tensor_has_one_owner_in_a_node, nodes_of_a_graph_have_the_bits_of_the_host,
    without_a_hierarchy_all_is_as_on_one_node, unequal_nodes_exchange_as_without,
    what_was_dropped_is_not_sent_later, keras_trains_by_nodes, variables_may_be_arguments,
    a_run_goes_on_with_other_nodes, a_run_goes_on_on_the_same_nodes,
    one_state_is_not_enough_for_other_nodes, a_rank_joins_at_a_step_of_the_graph,
]  # fmt: skip
