"""Messages that libraries write to stderr by themselves, held back and shown only after a failure."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from cifar_towers.errors import caused_by_interrupt


@contextlib.contextmanager
def messages_only_of_a_failure() -> Iterator[None]:
    """Hold back what is written to stderr inside; write it after an exception, and if the process is killed.

    A child process holds the messages, because an abort in native code ends this process without a chance to write.
    """
    command = ["sh", "-c", 'messages=$(cat); if [ "$messages" ]; then printf "%s\\n" "$messages" >&2; fi']
    child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)  # so that no Ctrl-C reaches it
    stderr = os.dup(2)
    assert child.stdin
    os.dup2(child.stdin.fileno(), 2)
    child.stdin.close()
    discard = True
    try:
        yield
    except Exception as error:
        discard = caused_by_interrupt(error)
        raise
    finally:
        if discard:
            child.kill()
        os.dup2(stderr, 2)  # closes this process's end of the pipe, which lets the child write
        os.close(stderr)
        child.wait()
