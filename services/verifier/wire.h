// Between the verifier's messages and the engine's values.
#ifndef COPPICE_SERVICES_VERIFIER_WIRE_H_
#define COPPICE_SERVICES_VERIFIER_WIRE_H_

#include "coppice/v1/verifier.pb.h"
#include "services/verifier/engine.h"
#include "services/verifier/step.h"

namespace coppice::verifier {

// Numbers that the engine's types cannot hold become ones that it refuses, never other valid ones.
Step FromWire(const v1::StepRequest& request);
v1::StepResult ToWire(const StepResult& result);
v1::PoolState ToWire(const PoolState& pool);
void SetCost(const Engine::Cost& cost, v1::VerifierInfo* info);

}  // namespace coppice::verifier

#endif  // COPPICE_SERVICES_VERIFIER_WIRE_H_
