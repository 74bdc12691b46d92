"""Which folders are checkpoints, after whatever has happened to them."""

from pathlib import Path

from pp_autopipeline.checkpoint_folder import CheckpointFolder


def write(folder: CheckpointFolder, step: int) -> None:
    folder.partial(step).mkdir(parents=True)
    (folder.partial(step) / "0.distcp").write_text(f"of step {step}")
    folder.publish(step, 1)


def test_one_that_was_set_aside_comes_back(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, None, None)
    write(folder, 7)
    folder.of(7).rename(tmp_path / ".step-00000007.old")  # killed while it was replaced
    folder.partial(7).mkdir()
    assert folder.steps() == []
    folder.remove_leftovers()
    assert folder.steps() == [7]
    assert folder.latest() == 7
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step-00000007"]


def test_those_saved_last_are_kept_and_not_those_of_the_highest_steps(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, 2, None)
    for step in (900, 1000, 50, 100, 150):
        write(folder, step)
    assert folder.steps() == [100, 150]
    (tmp_path / "latest").unlink()
    write(folder, 10)
    (tmp_path / "latest").unlink()
    assert folder.latest() == 10
