"""What a process that answers HTTP is made of, the same for router and engines: uvicorn with httptools and bounds on
what clients may do, the forms that both know on the wire, keys, logs, and an orderly end."""
