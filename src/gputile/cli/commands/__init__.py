"""One module per command; `group` imports a command when it is called."""
