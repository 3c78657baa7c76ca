"""A served model over HTTP, with the interface of OpenAI's API."""
