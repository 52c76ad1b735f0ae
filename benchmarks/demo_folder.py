"""The demo model as a plain Hugging Face folder, for engines that are not ours."""

import subprocess
import sys


def demo_folder() -> str:
    """What ``mini-infer demo-path`` prints."""
    done = subprocess.run([sys.executable, "-m", "mini_infer", "demo-path"], capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1]
