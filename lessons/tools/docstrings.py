"""Docstrings on the reference page as they are written: their columns and formulas are laid out by hand."""

import griffe


class AsWritten(griffe.Extension):
    def on_instance(self, *, obj, **kwargs):
        if obj.docstring and not obj.docstring.value.startswith("```"):
            obj.docstring.value = f"```text\n{obj.docstring.value}\n```"
