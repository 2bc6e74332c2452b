import pickle, sys
def frame(f, l, n): return {"filename": f, "line": l, "name": n}
torch_frame = frame("/usr/lib/python3/site-packages/torch/nn/modules/linear.py", 125, "forward")
model = [frame("??", 0, "c10::cuda::alloc"), torch_frame, frame("/home/user/train/model.py", 41, "attention")]
loss = [torch_frame, frame("/home/user/train/train.py", 88, "loss")]
base = 0x7F5C00000000
t = 1700000000000000
def e(action, addr, size, us, frames, stream=0):
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": t + us, "frames": frames}
trace = [
    e("segment_alloc", base, 20971520, 0, model),
    e("alloc", base, 4194304, 5, model),
    e("alloc", base + 4194304, 1048576, 9, loss, 94083020),
    e("free_requested", base, 4194304, 20, model),
    e("free_completed", base, 4194304, 21, model),
    e("free_completed", base + 8388608, 512, 25, []),
    {"action": "oom", "size": 1 << 40, "stream": 0, "time_us": t + 30, "device_free": 123456, "frames": loss},
    e("snapshot", 0, 0, 40, []),
]
def block(address, size, requested, state, frames):
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
segments = [{
    "device": 0, "address": base, "total_size": 20971520, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
    "allocated_size": 1049088, "active_size": 1049088, "requested_size": 1049076, "is_expandable": False, "frames": [],
    "blocks": [
        block(base, 4194304, 0, "inactive", []),
        block(base + 4194304, 1048576, 1048576, "active_allocated", loss),
        block(base + 5242880, 3145728, 0, "inactive", []),
        block(base + 8388608, 2048, 0, "inactive", []),
        block(base + 8390656, 512, 500, "active_allocated", []),
    ],
}]
snapshot = {"segments": segments, "device_traces": [trace, []], "allocator_settings": {"expandable_segments": False, "ratio": 0.5}, "external_annotations": []}
out, protocol = sys.argv[1], int(sys.argv[2])
if len(sys.argv) > 3: snapshot = {"segments": segments}
pickle.dump(snapshot, open(out, "wb"), protocol=protocol)
