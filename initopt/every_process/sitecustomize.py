"""Python imports this as it starts, where `initopt.run` has put its folder on PYTHONPATH; then the user's own, if any.

Any Python may be started there: this is plain enough for all of them, and does nothing in another installation. The
script is watched at once. Any other process may be a rank, or a launcher, a resource tracker, a loader's worker: it is
watched once it imports torch, and until then nothing of initopt is imported.
"""

import os
import sys
import time


class _Torch:
    """Stands among the finders of imports until torch is looked for, and finds nothing."""

    @classmethod
    def find_spec(cls, name, *_):
        """See whether it's torch's turn. Called by the import system."""
        if name == "torch":
            sys.meta_path.remove(cls)
            _watch()


def _watch():
    entered = time.thread_time()
    try:
        from initopt.watched_run import begin

        begin(entered)
    except Exception as error:  # whose process it is has no part in this
        sys.stderr.write("initopt: this process is not recorded: {}: {}\n".format(type(error).__name__, error))


_folder = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if path != _folder]
sys.path_importer_cache.pop(_folder, None)
sys.modules.pop(__name__, None)
_interpreter = "{}.{} {}:".format(sys.version_info[0], sys.version_info[1], sys.prefix)
_word = os.environ.get("INITOPT_RUN", "")
if _word.startswith(_interpreter):
    if _word[len(_interpreter) :].startswith("{}:".format(os.getpid())):
        _watch()
    else:
        sys.meta_path.insert(0, _Torch)

# One that is missing or fails does so here as it would have done without this one: the interpreter knows both.
import sitecustomize  # noqa: E402, F401
