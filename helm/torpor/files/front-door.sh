# A raylet of its own that joins the Ray cluster; then the service in this shell's place, which so gets the signals.
trap 'exit 143' TERM INT
mkdir -p "$HOME"
until ray start --address="$HEAD_ADDRESS" --num-cpus=0 --num-gpus=0 --object-store-memory=78643200 --disable-usage-stats; do
  echo "front door: Ray's head at $HEAD_ADDRESS does not answer yet" >&2
  sleep 2
done
exec torpor serve --connect "$HEAD_ADDRESS" --config "$CONFIG"
