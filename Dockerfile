# The gateway in a container: `docker build -t pointsman .`. See docs/operations.md.
FROM rust:1-slim-bookworm AS builder
WORKDIR /build
COPY . .
RUN cargo build --profile dist --locked --package pointsman-gateway --bin pointsman

FROM debian:bookworm-slim
# CA bundle for worker certificates, unless a file replaces it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --user-group --uid 65532 --no-create-home --shell /usr/sbin/nologin pointsman
COPY --from=builder /build/target/dist/pointsman /usr/local/bin/pointsman
# A numeric user, so that a cluster can verify that it is not root.
USER 65532:65532
# Clients and administration.
EXPOSE 8080 8081
STOPSIGNAL SIGTERM
ENTRYPOINT ["pointsman"]
CMD ["serve", "--config", "/etc/pointsman/pointsman.toml"]
