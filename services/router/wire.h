// Between the wire's messages and the scheduler's plain values.
#ifndef COPPICE_SERVICES_ROUTER_WIRE_H_
#define COPPICE_SERVICES_ROUTER_WIRE_H_

#include <vector>

#include "absl/status/statusor.h"
#include "coppice/v1/cluster.pb.h"
#include "coppice/v1/drafter.pb.h"
#include "coppice/v1/inference.pb.h"
#include "coppice/v1/verifier.pb.h"
#include "model/chat_template.h"
#include "services/router/peers.h"
#include "services/router/request.h"
#include "services/router/scheduler.h"
#include "services/router/stream.h"

namespace coppice::router {

// Verifier.
VerifierInfo FromWire(const v1::VerifierInfo& info);
StepResult FromWire(const v1::StepResult& result);
v1::StepRequest ToWire(const StepRequest& request);
v1::VerifierInfo ToWire(const VerifierInfo& info);

// Drafter.
DrafterInfo FromWire(const v1::DrafterInfo& info);
DraftReply FromWire(const v1::DraftReply& reply);
v1::DraftBatch ToWire(const DraftBatch& batch);
v1::DrafterInfo ToWire(const DrafterInfo& info);

// Inference.  The prompt is left to the caller: it takes a tokenizer.
RequestFields FieldsFromWire(const v1::GenerateRequest& request);
// INVALID_ARGUMENT, naming message and part, for what Coppice does not take: images.
absl::StatusOr<std::vector<ChatMessage>> MessagesFromWire(const v1::Chat& chat);
ChatOptions OptionsFromWire(const v1::Chat& chat);
v1::GenerateDelta ToWire(const Delta& delta);

v1::Build ToWire(const BuildLabel& build);

}  // namespace coppice::router

#endif  // COPPICE_SERVICES_ROUTER_WIRE_H_
