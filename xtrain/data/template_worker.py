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
    {"messages": ..., "add_generation_prompt": ...}     {"text": ..., "spans": [[start, end], ...],
                                                         "turns": [[message, start, end], ...]}
    any                                                 {"error": ...}, {"limit": "memory" or "text"}

spans: the characters of the text inside {% generation %} blocks.  turns: those that the template
writes while one of its loops is at a message, whose number comes first.

A template is a program of the model's author, and even a constant such as 10**(10**9) may take
forever while it is compiled. At the limit of time the kernel ends this process (SIGXCPU). This file
imports nothing of xtrain, so it starts quickly.
"""

import contextlib
import datetime
import json
import sys
import time

if __name__ == "__main__":
    sys.path += sys.argv[4:]

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.visitor


class TextLimit(Exception):
    """The rendered text is too long."""


class Marks(jinja2.ext.Extension):
    """Finds out what in the text is whose. {% generation %} ... {% endgeneration %} marks the
    model's text for training, and LoopMarker lets every loop call begin and end.

    length: of the text so far.  marked: (characters before the block, its text) of each.
    numbers: of the messages, by their id().  turns: [message, start, end) of the text that an
    iteration has written.  open: {loop: (message, start)} of the iterations that have begun.
    """

    tags = {"generation"}

    def __init__(self, environment):
        super().__init__(environment)
        self.start([])

    def start(self, messages):
        self.length = 0
        self.numbers = {id(message): i for i, message in enumerate(messages)}
        self.marked = []
        self.turns = []
        self.open = {}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def mark(self, caller):
        text = caller()
        self.marked.append((self.length, text))
        return text

    def begin(self, loop, item):
        self.end(loop)
        number = self.numbers.get(id(item))
        if number is not None:
            self.open[loop] = (number, self.length)

    def end(self, loop):
        number, start = self.open.pop(loop, (None, 0))
        if number is not None and self.length > start:
            self.turns.append([number, start, self.length])


class LoopMarker(jinja2.visitor.NodeTransformer):
    """Adds the calls of Marks to the loops of a template, except where text goes to a variable."""

    def __init__(self, marks):
        self.marks = marks
        self.loops = 0

    def visit_For(self, node):
        self.generic_visit(node)
        if not isinstance(node.target, jinja2.nodes.Name):
            return node
        self.loops += 1
        item = jinja2.nodes.Name(node.target.name, "load")
        node.body.insert(0, self.call("begin", node, item))
        return [node, self.call("end", node)]

    def call(self, name, loop, *arguments):
        number = jinja2.nodes.Const(self.loops)
        call = self.marks.call_method(name, [number, *arguments])
        return jinja2.nodes.ExprStmt(call).set_lineno(loop.lineno)

    def skip(self, node):
        return node

    visit_Macro = visit_CallBlock = visit_AssignBlock = visit_FilterBlock = skip


class Arguments(dict):
    """The arguments of a call: an object, which is JSON where a template joins it to a text.

    json: as the message has them, "" if it has an object.
    """

    json = ""

    def __radd__(self, text):
        return text + to_json(self)


class NoText(str):
    """The content of a message that has calls and no text: "", which `is none` for a template."""


def is_none(value):
    return value is None or isinstance(value, NoText)


def with_calls(message):
    """Prepare a message that has calls, for any template: "arguments" may be an object or, as in
    OpenAI's format, its JSON; and "content" may be missing."""
    message.setdefault("content", NoText())
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        text = ""
        if arguments is None:
            arguments = {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a model may write anything
                text = arguments or "{}"
                arguments = json.loads(text)
        if isinstance(arguments, dict):
            function["arguments"] = Arguments(arguments)
            function["arguments"].json = text


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Replace Jinja's own filter, which escapes characters for HTML."""
    if isinstance(x, Arguments) and x.json:
        return x.json
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise jinja2.TemplateError(message)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def compiled(source):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Marks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.tests["none"] = is_none
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    marks = environment.extensions[Marks.identifier]
    return environment.from_string(LoopMarker(marks).visit(environment.parse(source)))


def rendered(template, names, characters):
    """Return the text, [start, end) of every generation block in it, and whose the text is."""
    marks = template.environment.extensions[Marks.identifier]
    messages = names["messages"]
    if isinstance(messages, list):  # else the template rejects them
        for message in messages:
            if message.get("tool_calls"):
                with_calls(message)
        marks.start(messages)
    pieces = []
    for piece in template.generate(**names):
        marks.length += len(piece)
        if marks.length > characters:
            raise TextLimit
        pieces.append(piece)
    text = "".join(pieces)
    text.encode()  # ValueError for half a surrogate pair
    spans = [[start, start + len(block)] for start, block in marks.marked]
    if any(text[a:b] != block for (a, b), (_, block) in zip(spans, marks.marked)):
        spans = None  # a block inside a macro: where its text went is unknown
    return {"text": text, "spans": spans, "turns": marks.turns}


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
