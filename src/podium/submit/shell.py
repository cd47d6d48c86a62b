"""Commands and files of the machine where a target is: this one, or one that ssh reaches. Every word is quoted once."""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from podium.errors import UserError
from podium.submit.site import LoginSection

#: ssh asks no questions and does not wait for a host that is off
SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15")
_TIMEOUT_S = 120.0
_MAX_BYTES = 16 << 20
#: what ssh itself ends with when it cannot reach a host
_NO_CONNECTION = 255


@dataclass(frozen=True)
class Output:
    """What a command has printed, and how it ended."""

    code: int
    text: str
    errors: str

    @property
    def reason(self) -> str:
        """The last line that it printed about what went wrong."""
        lines = [line.strip() for line in (self.errors or self.text).splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self.code}"


@dataclass(frozen=True)
class Shell:
    """A place where commands run: here, or at `host`, with `ssh` and its options."""

    host: str | None = None
    ssh: str = "ssh"

    @property
    def name(self) -> str:
        return self.host or "this machine"

    def words(self, command: Sequence[str]) -> list[str]:
        """Return the words that run a command there. A remote shell sees each of its words in quotes."""
        if self.host is None:
            return list(command)
        return [*shlex.split(self.ssh), *SSH_OPTIONS, "--", self.host, shlex.join(command)]

    def run(self, command: Sequence[str], given: bytes = b"", env: Mapping[str, str] | None = None) -> Output:
        """Run a command to its end; raise UserError where it cannot be started or the host cannot be reached.

        `given`: its standard input, where secrets belong. `env`: variables of a command that runs here.
        """
        words = self.words(command)
        try:
            done = subprocess.run(
                words, input=given, capture_output=True, timeout=_TIMEOUT_S, env={**os.environ, **(env or {})}
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.name}: {command[0]} did not answer within {_TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise UserError(f"{words[0]} cannot be run here: {error.strerror}") from None
        text, errors = (data[:_MAX_BYTES].decode(errors="replace") for data in (done.stdout, done.stderr))
        output = Output(done.returncode, text, errors)
        if self.host is not None and done.returncode == _NO_CONNECTION:
            raise UserError(f"{self.host} cannot be reached by ssh: {output.reason}")
        return output

    def checked(self, command: Sequence[str], given: bytes = b"", env: Mapping[str, str] | None = None) -> str:
        """Run a command and return what it printed; raise UserError with its own words where it failed."""
        output = self.run(command, given, env)
        if output.code:
            raise UserError(f"{command[0]} on {self.name} failed: {output.reason}")
        return output.text

    def script(self, text: str) -> str:
        """Run a script of sh, which comes on standard input, and return what it printed."""
        return self.checked(["sh", "-s"], text.encode())

    def stream(self, command: Sequence[str]) -> Iterator[bytes]:
        """Yield what a command prints, until it ends or nobody asks for more."""
        try:
            process = subprocess.Popen(self.words(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as error:
            raise UserError(f"{command[0]} cannot be run: {error.strerror}") from None
        assert process.stdout is not None
        try:
            while part := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                yield part
        finally:
            process.kill()
            process.wait()

    # --- files ----------------------------------------------------------------------------------------------------

    def absolute(self, folder: str) -> PurePosixPath:
        """Return the absolute form of a folder there; relative ones begin at the home folder, or here."""
        if self.host is None:
            return PurePosixPath(Path(folder).absolute())
        if folder.startswith("/"):
            return PurePosixPath(folder)
        return PurePosixPath(self.checked(["sh", "-c", 'printf %s "$HOME"'])) / folder

    def names_in(self, folder: PurePosixPath) -> set[str]:
        """Return the names of what is in a folder, nothing where there is no such folder."""
        if self.host is None:
            return set(os.listdir(folder)) if os.path.isdir(folder) else set()  # noqa: PTH112, PTH208 (of a pure path)
        return set(self.run(["ls", "-A", "--", str(folder)]).text.splitlines())

    def write_new(self, folder: PurePosixPath, files: Mapping[str, str]) -> None:
        """Write files below a folder that has none of them yet; of a failure nothing is left behind."""
        lines = ["set -e", f"mkdir -p -- {shlex.quote(str(folder))}"]
        for name in sorted({str(PurePosixPath(name).parent) for name in files} - {"."}):
            lines.append(f"mkdir -p -- {shlex.quote(str(folder / name))}")
        for name, text in files.items():
            # Text as printf's argument: no marker that it could contain would end it.
            lines.append(f"printf %s {shlex.quote(text)} >{shlex.quote(str(folder / name))}")
        self.script("\n".join(lines) + "\n")

    def remove(self, folder: PurePosixPath) -> None:
        """Remove what `write_new` has written, and the folder above where nothing else is in it."""
        with suppress(UserError):
            self.run(["rm", "-rf", "--", str(folder)])
            self.run(["rmdir", "--", str(folder.parent)])

    def read(self, path: PurePosixPath, max_bytes: int = _MAX_BYTES) -> bytes | None:
        """Return what a file holds, at most `max_bytes` of it; None where there is none."""
        output = self.run(["head", "-c", str(max_bytes), "--", str(path)])
        return None if output.code else output.text.encode()


def login_shell(login: LoginSection) -> Shell:
    """Return the shell of a login node, or of this machine where a site names none."""
    return Shell(login.host, login.ssh)
