"""Faults of the checkpoints' storage: a full, read-only or stalled disk, and a flipped bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.chaos.process_faults import RESUMES, middle
from meshwright.chaos.scenario import Scenario, Stage
from meshwright.checkpoint.format.verify import list_checkpoints

STALL_SECONDS = 6.0
"""Seconds in which the stalled disk completes no write."""
BESIDE_TRAINING = ("checkpoint.mode=async",)
"""Override with which checkpoints are written while training continues."""
FAILED_SAVE = "o checkpoint of step"
"""Text in the line that reports a failed save."""


def mount_obstacle() -> str | None:
    """Return why this process cannot mount file systems; None if it can."""
    if os.geteuid() != 0:
        return "needs root to mount a file system"
    missing = [name for name in ("mount", "umount", "mkfs.ext4", "fsfreeze") if shutil.which(name) is None]
    return f"there is no command {missing[0]}" if missing else None


def mount(stage: Stage, *arguments: str, within: str = "checkpoints") -> Path:
    """Mount a file system until the stage closes, and return its folder. Its files are kept after that.

    `arguments` are those of mount(8). `within` is the folder below the run's folder; `""` is the run's folder itself.
    """
    folder = stage.run / within
    folder.mkdir(parents=True)

    def unmount() -> None:
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
            shutil.copytree(copy, folder, dirs_exist_ok=True)

    subprocess.run(["mount", *arguments, str(folder)], check=True)
    stage.on_close(unmount)
    return folder


def remount(folder: Path, options: str) -> None:
    """Change the options of a mounted file system. Open files may prevent this for a while, so it is tried repeatedly."""
    for _ in range(200):
        process = subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], capture_output=True, check=False)
        if process.returncode == 0:
            return
        time.sleep(0.02)
    process.check_returncode()


def fail_one_save(broken: str, repaired: str, within: str = "checkpoints") -> Callable[[Stage], None]:
    """Return a play that breaks a file system of the run until a save fails, and then repairs it.

    `broken` and `repaired` are mount options. `{used}` in `broken` becomes the bytes in use.
    """

    def play(stage: Stage) -> None:
        folder = mount(stage, "-t", "tmpfs", "-o", "size=50%", "none", within=within)
        job = stage.start()
        job.until_step(stage.template.every + 1)  # early, because the last save must find the repaired file system
        status = os.statvfs(folder)
        # At least one block: a tmpfs of size 0 has no limit, and the first save may not have written anything yet.
        used_bytes = max(status.f_blocks - status.f_bfree, 1) * status.f_frsize
        stage.mark()
        remount(folder, broken.format(used=used_bytes))
        job.until_printed(FAILED_SAVE)
        remount(folder, repaired)
        job.wait()
        good = [record["step"] for record in list_checkpoints(stage.run) if record["ok"]]
        stage.expect(
            good[-1:] == [stage.template.steps], f"the newest good checkpoint is {good[-1:]}, not the last step's"
        )
        stage.notes.append(f"good checkpoints: {', '.join(map(str, good))}")

    return play


def stall(stage: Stage) -> None:
    """Freeze the checkpoints' file system for some seconds in which a save begins."""
    image = stage.folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    folder = mount(stage, "-o", "loop", str(image))
    shutil.rmtree(folder / "lost+found")
    job = stage.start()
    job.until_step(middle(stage))
    stage.mark()
    subprocess.run(["fsfreeze", "--freeze", str(folder)], check=True)
    try:
        deadline = time.monotonic() + STALL_SECONDS
        while time.monotonic() < deadline:
            job.poll()
            time.sleep(0.02)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(folder)], check=True)
    job.wait()
    records = list_checkpoints(stage.run)
    stage.expect(all(record["ok"] for record in records), "a checkpoint is damaged")


def corrupt_newest(stage: Stage) -> None:
    """End the run, flip one bit in the newest checkpoint, and start the command again."""
    job = stage.start()
    job.until_step(middle(stage))
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    newest = Path(list_checkpoints(stage.run)[-1]["path"])
    file = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as data:
        data.seek(file.stat().st_size - 100)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 4]))
    stage.mark()
    second_start = stage.start()
    second_start.wait()
    stage.expect(
        newest.name in second_start.output and "damaged" in second_start.output,
        f"no line says that {newest.name} is damaged",
    )


STORAGE_FAULTS = (
    Scenario(
        name="corrupt-newest",
        promise=f"One flipped bit in the newest checkpoint is found before it is used; from the checkpoint before it {RESUMES}.",
        play=corrupt_newest,
    ),
    Scenario(
        name="disk-full",
        promise="A save that finds the disk full is reported, training goes on with the same losses, and later saves succeed.",
        play=fail_one_save("size={used}", "size=50%"),
        overrides=BESIDE_TRAINING,
        detected_by=FAILED_SAVE,
        restarts=False,
        unavailable=mount_obstacle,
    ),
    Scenario(
        name="disk-full-run",
        promise="When the disk of the whole run folder is full, training goes on with the same losses, and metrics and later saves "
        "are written once there is space.",
        play=fail_one_save("size={used}", "size=50%", within=""),
        overrides=BESIDE_TRAINING,
        detected_by=FAILED_SAVE,
        restarts=False,
        unavailable=mount_obstacle,
    ),
    Scenario(
        name="disk-readonly",
        promise="A save on a read-only file system is reported, training goes on with the same losses, and later saves succeed.",
        play=fail_one_save("ro", "rw"),
        overrides=BESIDE_TRAINING,
        detected_by=FAILED_SAVE,
        restarts=False,
        unavailable=mount_obstacle,
    ),
    Scenario(
        name="disk-slow",
        promise=f"A disk that completes no write for {STALL_SECONDS:g} s is no hang: no restart, the same losses, undamaged checkpoints.",
        play=stall,
        restarts=False,
        unavailable=mount_obstacle,
    ),
)
