"""Put into the site what runs the lessons in a browser: Pyodide, NumPy, CodeMirror, xtrain and the judges.

As a hook of mkdocs. npm fetches the packages of lessons/browser/package-lock.json, with their checksums, into the cache of
xtrain, once: later builds need no network. `XTRAIN_BROWSER=false mkdocs build` leaves them and the exercises' editors out.

    python lessons/tools/browser.py FOLDER        only the files, for tests
"""

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from xtrain import lesson  # noqa: E402
from xtrain.device import cache_folder  # noqa: E402
from xtrain.errors import UserError  # noqa: E402

SOURCE = ROOT / "lessons" / "browser"
PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.js",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
NUMPY = "lib/python3.12/site-packages/"
UNUSED = re.compile(  # of NumPy: its tests, its compilers, what only they need
    r"/(tests|f2py|distutils|_pyinstaller|include|typing)/|(?<!array)_tests?\.|_simd\.|\.pyi$|\.a$|\.pxd$|\.pyx$"
)
XTRAIN = ("xtrain/**/*.py", "xtrain/simulator/*.html", "lessons/checks/*.py")
IMPORT = re.compile(r"""^((?:im|ex)port .*from )['"](@?[a-z][\w./-]*)['"]""", re.M)  # of a package

BF16 = "It computes with bf16, which NumPy in a browser does not have."
FP8 = "It computes with fp8, which NumPy in a browser does not have."
RANKS = "Its ranks are threads, which Python in a browser does not have."
ELSEWHERE = {  # exercise -> why it does not run in a browser
    **dict.fromkeys(("12.2", "12.3", "14.1", "14.3", "23.1"), BF16),
    **dict.fromkeys(("45.1", "45.2"), FP8),
    **dict.fromkeys(("32.1", "32.2", "32.4"), RANKS),
}


# ----------------------------------------------------------------------------- the files
def packages() -> Path:
    """Return the folder with the npm packages. Raises UserError if they are not in the cache and cannot be fetched."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    folder = cache_folder() / "browser" / hashlib.sha256(lock).hexdigest()[:16]
    if (folder / "complete").exists():
        return folder / "node_modules"
    instead = "or leave the browser out: XTRAIN_BROWSER=false mkdocs build"
    if shutil.which("npm") is None:
        raise UserError(
            f"the site needs npm for what runs in a browser: install Node.js, {instead}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copy(SOURCE / name, folder)
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        lines = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
        raise UserError(
            f"npm cannot fetch what runs in a browser ({lines[0]}): try again with a network, {instead}"
        )
    (folder / "complete").touch()
    return folder / "node_modules"


def site_files() -> dict[str, bytes]:
    """Return the content of every file that is made here, by its path in the site's folder browser/."""
    modules = packages()
    found = {f"pyodide/{name}": (modules / "pyodide" / name).read_bytes() for name in PYODIDE}
    found["licenses.txt"] = _licenses(modules).encode()
    found["numpy.zip"] = _numpy(modules / "@emscripten-forge" / "numpy")
    found["xtrain.zip"] = _xtrain()
    for name in _editor_packages():
        text = (modules / name / _module_of(modules / name)).read_text(encoding="utf-8")
        text = IMPORT.sub(lambda match: f'{match[1]}"./{_file_name(match[2])}"', text)
        found[f"codemirror/{_file_name(name)}"] = text.encode()
    return found


def write(made: dict[str, bytes], folder: Path) -> None:
    """Write the files, and those of lessons/browser that the site serves as they are, to a folder."""
    for name, content in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for path in (*SOURCE.glob("*.js"), *SOURCE.glob("*.css")):
        shutil.copy(path, folder)


def _numpy(package: Path) -> bytes:
    """NumPy's conda package as a zip of what programs import, with its license."""
    (archive,) = package.glob("pkg/*.tar.gz")
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(NUMPY)
            wanted = name.startswith("numpy/") or name.endswith("/LICENSE.txt")
            if (
                member.isfile()
                and member.name.startswith(NUMPY)
                and wanted
                and not UNUSED.search(name)
            ):
                files[name] = tar.extractfile(member).read()
    return _zip(files)


def _xtrain() -> bytes:
    """The library and the judges, as in the repository; lessons/browser/python, and what it imports of lessons/tools."""
    paths = [path for pattern in XTRAIN for path in ROOT.glob(pattern)]
    files = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in paths}
    for path in (ROOT / "lessons/tools/traced.py", *(SOURCE / "python").glob("*.py")):
        files[path.name] = path.read_bytes()
    return _zip(files)


def _zip(files: dict[str, bytes]) -> bytes:
    """The same files make the same bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name], zipfile.ZIP_DEFLATED, 9)
    return buffer.getvalue()


def _licenses(modules: Path) -> str:
    """Name, version and license of every package, with its text where the package has one; NumPy's is in numpy.zip."""
    parts = []
    for name in ("pyodide", "@emscripten-forge/numpy", *_editor_packages()):
        about = json.loads((modules / name / "package.json").read_text(encoding="utf-8"))
        texts = [path.read_text(encoding="utf-8") for path in (modules / name).glob("LICENSE*")]
        title = f"{name} {about['version']}: {about.get('license', 'see its homepage')}"
        parts.append("\n\n".join([title, *texts]))
    return "\n\n----\n\n".join(parts)


def _editor_packages() -> list[str]:
    """CodeMirror and what it needs: all packages but Pyodide, what Pyodide needs in Node.js, and NumPy."""
    lock = json.loads((SOURCE / "package-lock.json").read_text(encoding="utf-8"))
    names = [key.removeprefix("node_modules/") for key in lock["packages"] if key]
    return [name for name in names if name not in ("pyodide", "ws", "@emscripten-forge/numpy")]


def _module_of(package: Path) -> str:
    """The file of a package that `import` finds."""
    about = json.loads((package / "package.json").read_text(encoding="utf-8"))
    return about.get("exports", {}).get("import") or about["module"]


def _file_name(package: str) -> str:
    return package.rpartition("/")[2] + ".js"


# ----------------------------------------------------------------------------- the pages
def pieces(text: str, number: int) -> list[dict]:
    """The cells of a lesson that `xtrain lesson start` writes to the reader's file, in their order.

    number: of the exercise, or None.  name: of its first function.  editor: whether it is a cell of the page that the
    reader edits. elsewhere: why it does not run in a browser, or None.
    """
    judges = lesson.load_checks("api")
    exercises = {e.name: e.number for e in judges._exercises_of(str(number))}
    found = []
    for header, code in judges.cells(text):
        if not re.search(r'"(imports|exercise)"', header):
            continue
        names = re.findall(r"^(?:def|class) (\w+)", code, re.M)
        numbers = [exercises[name] for name in names if name in exercises]
        mine = numbers[0] if '"exercise"' in header and numbers else None
        found.append(
            {
                "number": mine,
                "name": names[0] if names else None,
                "editor": '"exercise"' in header,
                "elsewhere": ELSEWHERE.get(mine),
                "text": judges.plain_solution(code),
            }
        )
    return found


def with_editors(html: str, path: Path) -> str:
    """Mark the exercises in a lesson's HTML, and add what exercises.js needs. path: of the lesson's .py"""
    number = int(path.name[:2])
    judges = lesson.load_checks("api")
    found = pieces(path.read_text(encoding="utf-8"), number)
    places = iter([str(i) for i, piece in enumerate(found) if piece["editor"]])
    mark = lambda match: f'{match[0]}data-piece="{next(places)}" '
    html = re.sub(r'celltag_exercise" (?=id=)', mark, html)
    data = {"file": path.stem, "lesson": number, "head": judges.head(path), "pieces": found}
    text = json.dumps(data).replace("<", "\\u003c")
    return (
        f'{html}\n<script type="application/json" id="lesson-exercises">{text}</script>'
        '<script>location.protocol == "file:" || import("./browser/exercises.js")</script>'
    )


# ----------------------------------------------------------------------------- hooks
def on_config(config):
    """Read the option: extra.browser in mkdocs.yml, which the environment variable sets."""
    config["extra"].setdefault("browser", True)
    return config


def on_files(files, config):
    """Add the files to the site."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    if not config["extra"]["browser"]:
        return files
    try:
        made = site_files()
    except UserError as error:
        raise PluginError(str(error)) from None
    for name, content in made.items():
        files.append(File.generated(config, f"browser/{name}", content=content))
    return files


def on_page_content(html, page, config, files):
    """Add the editors to a lesson."""
    path = ROOT / "lessons" / page.file.src_path
    if not config["extra"]["browser"] or not re.match(r"\d\d_.*\.ipynb$", page.file.src_path):
        return html
    return with_editors(html, path.with_suffix(".py"))


if __name__ == "__main__":
    write(site_files(), Path(sys.argv[1]))
