"""One rank of a run that cannot go on: rank 1 is killed, or has joined, after 5 steps.

Run as `tensorflow_fail.py kill|join`.
"""

import os
import signal
import sys

import horovod.tensorflow as hvd
import tensorflow as tf

from sn_compress import FFTCompression

gather = FFTCompression.using()  # LowRankCompression survives join where there are no nodes
hvd.init()
if sys.argv[1] == "kill":
    # The launcher ends the others as soon as one is dead: they are to learn it by themselves.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
variable = tf.Variable(tf.ones([256, 256]))


@tf.function
def step(x):
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=gather) as tape:
        loss = tf.reduce_mean((x @ variable) ** 2)
    variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])


for i in range(1000):
    if hvd.rank() == 1 and i == 5:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.join()
        sys.exit(0)
    step(tf.random.normal([8, 256]))
    if i == 4:
        print("reached step 5", flush=True)
print("all steps done", flush=True)
