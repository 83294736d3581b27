"""One module per subcommand: parse, call, print."""
