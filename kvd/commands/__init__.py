"""Commands for operators: one module each, with `main(argv) -> int`."""
