"""Files of folders that others made: links out of the folder, sparse files, pipes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.data.chats import CHATML, marked, write_tokenizer

import meshwright
from meshwright.checkpoint.models.hf import import_hf
from meshwright.data.chat import read_chat_files
from meshwright.data.chat_template import copy_chat_files
from meshwright.data.tokenizer import load_tokenizer
from meshwright.data.tokenizer_file import open_tokenizer
from meshwright.data.vocabulary import read_vocabulary
from meshwright.families.folder import read_json
from meshwright.server.model_files import read_model_files
from meshwright.spec.errors import BadInput
from meshwright.spec.folder_files import read_folder_file


def read_chats(folder: Path) -> None:
    read_chat_files(folder, None)


def copy_chats(folder: Path) -> None:
    (folder / "copy").mkdir()
    copy_chat_files(folder, folder / "copy")


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("chat_template.jinja", read_chats),
    ("chat_template.jinja", copy_chats),
    ("chat_template.jinja", read_model_files),
    ("additional_chat_templates/tool_use.jinja", read_chats),
    ("tokenizer_config.json", read_chats),
    ("tokenizer.json", load_tokenizer),
    ("tokenizer.json", read_vocabulary),
    ("tokenizer.json", read_model_files),
    ("tokenizer.json", lambda folder: open_tokenizer(folder / "tokenizer.json")),
    ("additional_chat_templates/tool_use.jinja", read_model_files),
    ("generation_config.json", read_model_files),
    ("special_tokens_map.json", read_model_files),
    ("config.json", lambda folder: read_json(folder / "config.json")),
    ("config.json", import_hf),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_tokenizer(tmp_path / "model", marked(CHATML))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(marked(CHATML))
    for name in ("config.json", "generation_config.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_link_out_of_the_folder_is_not_followed(
    folder: Path, tmp_path: Path, name: str, read: Callable[[Path], object]
) -> None:
    shutil.move(folder / name, tmp_path / "secret")
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(BadInput, match=rf"{name}: is a link to {tmp_path}/secret, outside {folder}; copy the file"):
        read(folder)


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_huge_file_is_refused_before_it_is_read(folder: Path, name: str, read: Callable[[Path], object]) -> None:
    os.truncate(folder / name, 2 << 30)
    with pytest.raises(
        BadInput, match=rf"{name}: has 2,147,483,648 bytes, expected at most [\d,]+; is it another file"
    ):
        read(folder)


def test_no_other_way_opens_a_tokenizer_s_file() -> None:
    """The library's own would follow any link and read any size."""
    package = Path(meshwright.__file__).parent
    assert not [file for file in package.rglob("*.py") if "Tokenizer.from_file" in file.read_text()]


def test_links_inside_a_folder_and_of_the_hub_s_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1f3", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "abc").write_text(json.dumps({"a": 1}))
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "other.json").symlink_to("config.json")
    assert read_json(snapshot / "config.json") == read_json(snapshot / "other.json") == {"a": 1}
    (tmp_path / "linked").symlink_to(snapshot)
    assert read_json(tmp_path / "linked" / "config.json") == {"a": 1}


def test_files_that_a_person_names_may_be_links(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(folder / "tokenizer.json")
    assert load_tokenizer(tmp_path / "link.json").record == load_tokenizer(folder).record


def test_pipes_and_files_in_place_of_folders_are_named(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(BadInput, match="pipe: is a directory, pipe or device; expected a file"):
        read_folder_file(folder / "pipe", 100)
    with pytest.raises(BadInput, match=r"config.json: is a file; expected a Hugging Face folder"):
        import_hf(folder / "config.json")
