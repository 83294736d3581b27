"""One module per subcommand: parse, call, print. May import everything but `cli`."""
