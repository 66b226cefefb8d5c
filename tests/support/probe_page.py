"""A page of metrics with the probe's."""

PAGE = """\
# TYPE vllm:readiness_execute_model_seconds histogram
vllm:readiness_execute_model_seconds_bucket{le="0.001",process="rank0"} 0.0
vllm:readiness_execute_model_seconds_bucket{le="0.002",process="rank0"} 10.0
vllm:readiness_execute_model_seconds_bucket{le="+Inf",process="rank0"} 10.0
vllm:readiness_execute_model_seconds_count{process="rank0"} 10.0
vllm:readiness_execute_model_seconds_sum{process="rank0"} 0.015
vllm:readiness_fence_seconds_bucket{le="0.001",owner="output",process="rank0"} 4.0
vllm:readiness_fence_seconds_bucket{le="0.002",owner="output",process="rank0"} 4.0
vllm:readiness_fence_seconds_bucket{le="+Inf",owner="output",process="rank0"} 5.0
vllm:readiness_fence_seconds_count{owner="output",process="rank0"} 5.0
vllm:readiness_fence_seconds_sum{owner="output",process="rank0"} 0.01
vllm:readiness_output_interval_seconds_bucket{le="+Inf",process="rank0"} 9.0
vllm:readiness_output_interval_seconds_count{process="rank0"} 9.0
vllm:readiness_output_interval_seconds_sum{process="rank0"} 0.5
vllm:readiness_tokens_total{process="engine0"} 80.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.004",model_name="m"} 2.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 0.006
"""
