"""`python -m podium` is `podium`."""

import os

from podium.launch.lifeline import end_with_launcher

end_with_launcher(os.environ)  # before anything heavy is loaded

from podium.cli import main  # noqa: E402

main()
