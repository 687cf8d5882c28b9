"""What an interface counts, predicted: payloads, headers, and what Horovod's ranks tell each other.

Horovod's background thread asks all ranks in every cycle, a millisecond by default, what is ready.
While it moves a payload it does not ask. So of a step it asks for as long as the link is free, at
the rate that is measured while nothing is to be sent.
"""

from __future__ import annotations

# A virtual cable takes segments of up to 64 KiB at once (GSO) and counts one header for each:
# Ethernet 14, IPv4 20, TCP 20 and its time stamp 12 bytes. The other side acknowledges every one.
SEGMENT, HEADERS = 65483, 66


def header_bytes(payload: float) -> float:
    """Headers of what a rank sends, and of its acknowledgements of as much that it receives."""
    return 2 * HEADERS * payload / SEGMENT


def predicted_bytes(
    reported: float, *, idle_bytes_per_s: float, step_s: float, gbit: float
) -> float:
    """Bytes a rank's interface should count in a step.

    reported : bytes of its collectives that leave it in a step
    idle_bytes_per_s : what leaves it while there is nothing to do
    step_s : seconds of a step
    gbit : of the link
    """
    free_s = max(step_s - reported / (gbit * 1e9 / 8), 0.0)
    return reported + header_bytes(reported) + idle_bytes_per_s * free_s
