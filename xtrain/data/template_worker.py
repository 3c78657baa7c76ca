"""The program that compiles and renders one chat template, under limits of time, memory and output.
`ChatTemplate` starts it.

    python -I -S template_worker.py SECONDS BYTES CHARACTERS FOLDER ...

SECONDS     CPU time per request
BYTES       of address space
CHARACTERS  of a rendered conversation
FOLDER      where the packages jinja2 and markupsafe are

Requests and replies are JSON, one per line, on standard input and output. A source is compiled,
messages are rendered by the last one:

    {"source": ...}                                     {}
    {"messages": ..., "add_generation_prompt": ...}     {"text": ..., "spans": [[start, end], ...]}
    any                                                 {"error": ...}, {"limit": "memory" or "text"}

spans: the characters of the text inside {% generation %} blocks.

A template is a program of the model's author, and even a constant such as 10**(10**9) may take
forever while it is compiled. At the limit of time the kernel ends this process (SIGXCPU). This file
imports nothing of xtrain, so it starts quickly.
"""

import datetime
import json
import sys
import time

if __name__ == "__main__":
    sys.path += sys.argv[4:]

import jinja2
import jinja2.ext
import jinja2.sandbox


class TextLimit(Exception):
    """The rendered text is too long."""


class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %} marks the model's text for training.

    pieces: of the text so far.  marked: (characters before the block, its text) of each.
    """

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        self.pieces, self.marked = [], []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller):
        text = caller()
        self.marked.append((sum(map(len, self.pieces)), text))
        return text


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replace Jinja's own filter, which escapes characters for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise jinja2.TemplateError(message)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def compiled(source):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment.from_string(source)


def rendered(template, names, characters):
    """Return the text, and [start, end) of every generation block in it."""
    generation = template.environment.extensions[Generation.identifier]
    pieces = []
    length = 0
    generation.pieces = pieces
    generation.marked = []
    for piece in template.generate(**names):
        length += len(piece)
        if length > characters:
            raise TextLimit
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # ValueError for half a surrogate pair
    spans = [[start, start + len(block)] for start, block in generation.marked]
    if any(text[a:b] != block for (a, b), (_, block) in zip(spans, generation.marked)):
        spans = None  # a block inside a macro: where its text went is unknown
    return {"text": text, "spans": spans}


def one_line(error):
    from_template = isinstance(error, jinja2.TemplateError) and str(error)
    if from_template:
        text = str(error)
    else:
        text = f"{type(error).__name__} {error}"
    return " ".join(text.split())[:300]


def limit(name, value):
    """Lower a soft limit of this process. Windows has no such limits; there ChatTemplate's clock
    must suffice."""
    try:
        import resource
    except ImportError:
        return
    which = getattr(resource, name)
    hard = resource.getrlimit(which)[1]
    if hard == resource.RLIM_INFINITY:
        soft = value
    else:
        soft = min(value, hard)
    resource.setrlimit(which, (soft, hard))


def main():
    seconds, memory, characters = map(int, sys.argv[1:4])
    limit("RLIMIT_AS", memory)
    limit("RLIMIT_CORE", 0)
    template = None
    for line in sys.stdin.buffer:
        limit("RLIMIT_CPU", int(time.process_time()) + 1 + seconds)
        try:
            request = json.loads(line)
            if "messages" in request:  # first: other names may be a client's
                reply = rendered(template, request, characters)
            else:
                template = compiled(request["source"])
                reply = {}
        except MemoryError:
            reply = {"limit": "memory"}
        except TextLimit:
            reply = {"limit": "text"}
        except Exception as error:  # any Python error, such as a KeyError of '{x}'.format()
            reply = {"error": one_line(error)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
