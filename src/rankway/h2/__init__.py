"""gRPC servers straight on the transport: HTTP/2, calls, and grpcio's own server behind them for all the rest."""
