"""The `podium` command on pretended devices, by hand:

python -m tests.support.pretend 2 certify mnist --out /tmp/card     on two of them
"""

import subprocess
import sys

from tests.support import pretend


def main() -> int:
    count, *words = sys.argv[1:]
    env = pretend.environment(int(count), GLOO_SOCKET_IFNAME="lo")
    return subprocess.run([sys.executable, "-m", "podium", *words], env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
