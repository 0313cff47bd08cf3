"""The load generator, its reports and the demo: clients of a real server over HTTP."""
