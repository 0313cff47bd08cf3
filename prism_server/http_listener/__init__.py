"""HTTP on a socket, the same for router and engines: uvicorn with httptools, and bounds on what clients may do."""
