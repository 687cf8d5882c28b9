"""horovodrun, told that Gloo is built: to find out, it loads TensorFlow twice in each run.

That is 2.7 s of a processor, and tests start ranks a hundred times. Whether it is built the ranks
themselves find out.
"""

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
