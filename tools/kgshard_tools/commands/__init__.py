"""One module a command: it parses, calls one function, and says what came of it."""
