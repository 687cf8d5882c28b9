"""Start the example under horovodrun and show its output: shared by the demo and the study."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent / "torch_fashion_mnist.py"
_PREFIX = re.compile(r"^\[\d+\]<(stdout|stderr)>:")  # horovodrun's, before each line of a rank


def find_horovodrun():
    """Return the horovodrun of this Python, or else the one on PATH."""
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    horovodrun = shutil.which("horovodrun", path=places)
    if not horovodrun:
        raise SystemExit(
            f"horovodrun is neither next to {sys.executable} nor on PATH. `make setup` builds"
            " Horovod into .venv; scripts/build_horovod.py builds it for the Python that runs it."
        )
    return horovodrun


def train(*flags, ranks=2, title=""):
    """Run the example on `ranks` processes, show its progress, and return its history (a dict)."""
    with tempfile.TemporaryDirectory() as folder:
        history = Path(folder) / "history.json"
        command = [find_horovodrun(), "-np", str(ranks), sys.executable, str(EXAMPLE)]
        command += [*map(str, flags), "--history", str(history)]
        code, own_lines = _follow(command, title)
        if code or not history.exists():
            # horovodrun's traceback is about itself; readers need to know which rank failed how.
            ended = [line for line in own_lines if line.startswith("Process ")]
            message = "\n".join(ended or own_lines[-12:])
            raise SystemExit(f"{message}\n{' '.join(command)}\nended with status {code}; see above")
        return json.loads(history.read_text())


def _follow(command, title):
    """Show what the ranks print, without prefixes; return the status and horovodrun's own lines."""
    # In a clone that is not installed, sn_compress is next to examples/.
    paths = [os.environ.get("PYTHONPATH"), str(EXAMPLE.parent.parent)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        # With more threads than cores, ranks on one machine would slow each other down.
        "OMP_NUM_THREADS": "1",
        # Horovod imports TensorFlow where it is installed, which logs at every start.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "TF_ENABLE_ONEDNN_OPTS": os.environ.get("TF_ENABLE_ONEDNN_OPTS", "0"),
    }
    live, own_lines = sys.stdout.isatty(), []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as process:
        # newline="" keeps the carriage returns by which a progress bar redraws itself.
        for line in io.TextIOWrapper(process.stdout, "utf-8", errors="replace", newline=""):
            text = line.rstrip("\r\n")
            if not _PREFIX.match(text):
                own_lines.append(text)
            elif (text := _PREFIX.sub("", text)) and (live or line.endswith("\n")):
                end = "\n" if line.endswith("\n") else ""
                print("\r\x1b[K" * live + title + text, end=end, flush=True)
    return process.returncode, own_lines
